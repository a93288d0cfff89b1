"""Whether a model fits on accelerators, how, and what its steps must cost there at least, told from headers alone."""
