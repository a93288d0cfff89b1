"""Images and videos in prompts: access, decoding, resizing, and placeholders in prompts. Imports no JAX."""
