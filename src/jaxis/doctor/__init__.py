"""Whether this installation, on this machine's devices, computes what it should: kernels, a model, and its speed."""
