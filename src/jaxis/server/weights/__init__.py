"""Other weights for the served model while it runs: pauses, sleep and updates, under the names of vLLM."""
