"""Distillation: a student learns the next-token distributions of a teacher (arXiv:2306.13649)."""
