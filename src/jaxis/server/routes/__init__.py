"""Routes that belong to no protocol alone."""
