"""Reasons, common to several sections, why a field has no effect."""

TORCH_ONLY = "it arranges how PyTorch computes"
