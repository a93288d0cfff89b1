"""Can a checkpoint run, and what is missing."""
