"""Checkpoints in other formats."""
