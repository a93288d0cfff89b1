"""Checks of this installation on this machine's devices: kernels, a model, and its speed."""
