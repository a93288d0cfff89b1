"""Tells routers outside the engine what the prefix cache holds, in the format that vLLM publishes."""
