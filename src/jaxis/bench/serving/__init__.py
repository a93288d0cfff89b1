"""Benchmarks of an OpenAI-compatible server from outside: requests, arrival times, and timed results."""
