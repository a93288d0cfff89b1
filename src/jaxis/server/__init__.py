"""The HTTP server: OpenAI's API, and those of other servers."""
