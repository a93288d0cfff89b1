"""Adapters (LoRA) that a server's requests ask for by name."""
