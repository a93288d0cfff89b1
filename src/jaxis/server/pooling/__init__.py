"""Vectors, scores and rankings of texts, in the APIs of OpenAI, Cohere, Jina, vLLM, Ollama and llama-server."""
