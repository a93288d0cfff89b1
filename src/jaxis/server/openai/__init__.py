"""OpenAI's endpoints, with vLLM's fields where OpenAI has none."""
