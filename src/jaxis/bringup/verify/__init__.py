"""Is a model right: layer by layer and path by path, against the reference."""
