"""Vision towers: the transformer and the projector that families share, and a module for each kind of tower."""
