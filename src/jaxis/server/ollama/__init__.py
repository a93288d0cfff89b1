"""Ollama's API, as far as a server of one model has it."""
