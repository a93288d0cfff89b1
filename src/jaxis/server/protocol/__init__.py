"""What comes in and goes out, as pydantic models: OpenAI's fields, and vLLM's where OpenAI has none."""
