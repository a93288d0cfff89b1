"""LoRA adapters that requests ask for by name."""
