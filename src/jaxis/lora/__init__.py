"""Adapters (LoRA): PEFT's files, merged into a model's weights as these are loaded, or chosen by each request."""

from jaxis.lora.request import LoRARequest

__all__ = ["LoRARequest"]
