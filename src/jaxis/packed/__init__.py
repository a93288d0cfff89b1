"""Packed folders: a model's weights in a file as the native CPU kernels read them, which an engine maps."""
