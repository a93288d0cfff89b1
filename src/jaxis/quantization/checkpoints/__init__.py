"""Formats of quantized checkpoints: one file for each tool, with its formats in `FORMATS`.

`checkpoint_formats.py` finds the files here; nothing else names them. They have no order.
"""
