"""Speculative decoding: guesses at a sequence's next tokens, which the model checks several at a time."""
