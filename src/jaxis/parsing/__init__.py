"""From an answer's text to its reasoning, tool calls and content; no HTTP, no JAX."""
