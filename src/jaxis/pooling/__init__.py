"""Embedding models and classifiers: hidden states of encoders or decoders, pooled into one vector for each input."""
