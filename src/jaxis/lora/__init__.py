"""Adapters (LoRA): PEFT's files, merged into a model's weights as these are loaded."""
