"""Vectors, scores and rankings of texts, in the words of OpenAI, Cohere, Jina, vLLM, Ollama and llama-server."""
