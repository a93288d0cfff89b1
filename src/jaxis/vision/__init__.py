"""Images in prompts: decoding, resizing, encoding by a model's image encoder, and embedding in the prompt."""
