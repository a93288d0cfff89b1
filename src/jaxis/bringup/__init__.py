"""Model bring-up: tools that analyse a checkpoint, verify its model, convert it and report on it."""
