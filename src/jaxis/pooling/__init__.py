"""Vectors instead of tokens: encoders and decoders whose hidden states are pooled into one vector an input."""
