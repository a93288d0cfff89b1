"""Generation for every protocol: a job, its outputs, and the events in them."""
