"""Plans from headers alone: a model's fit on accelerators, its layout, and the least cost of its steps there."""
