"""Requests and responses as pydantic models: OpenAI's fields, and vLLM's where OpenAI has none."""
