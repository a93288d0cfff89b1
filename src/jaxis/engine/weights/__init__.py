"""Weights of a running engine: other ones, their version, and none for a while."""
