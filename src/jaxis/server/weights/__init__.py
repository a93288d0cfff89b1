"""Changes of the served model's weights while it runs: pauses, sleep and updates, under vLLM's names."""
