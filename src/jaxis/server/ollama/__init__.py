"""Ollama's API, without its management of models."""
