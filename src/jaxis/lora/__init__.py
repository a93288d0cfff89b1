"""LoRA adapters: PEFT's files, merged into a model's weights while loading, or chosen by each request."""

from jaxis.lora.request import LoRARequest

__all__ = ["LoRARequest"]
