"""Benchmarks: the machine's limits, lower bounds of a model's steps, and how fast the engine runs them."""
