"""Embedded inputs of prompts, such as images: parts of a prompt whose embeddings an encoder computes."""
