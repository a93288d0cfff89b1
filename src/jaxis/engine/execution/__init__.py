"""Runs steps on the devices: inputs, programs, caches, sampling."""
