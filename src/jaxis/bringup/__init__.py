"""Bringing a model up: tools that analyse a checkpoint, prove its model right, convert it and report on it."""
