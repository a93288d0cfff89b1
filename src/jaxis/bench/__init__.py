"""Benchmarks: the machine's limits, lower bounds of a model's steps, and the engine's speed."""
