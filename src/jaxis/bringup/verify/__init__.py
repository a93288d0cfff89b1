"""Verifies a model against the reference, layer by layer and path by path."""
