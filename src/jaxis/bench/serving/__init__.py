"""Measuring an OpenAI-compatible server from outside: requests, when to send them, what came back and when."""
