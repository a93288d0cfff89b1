"""A model that makes vectors behind an event loop, in its own process."""
