"""Parsers that split an answer's text into reasoning, tool calls and content; no HTTP, no JAX."""
