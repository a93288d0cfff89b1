"""Blocks of the KV cache beyond the devices: in the host's memory, and on disk."""
