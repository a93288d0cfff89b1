"""A step on the devices: inputs, programs, caches, sampling."""
