"""Measuring: the machine's limits, what a model's steps cost at least, and how fast the engine runs them."""
