"""Choosing tokens from logits on device: arg-max, top tokens, filtered categorical sampling, log-probabilities."""

from jaxis.kernels.sampling.categorical import sample_categorical
from jaxis.kernels.sampling.filters import TokenFilters
from jaxis.kernels.sampling.tiles import argmax, logsumexp, top_tokens

__all__ = ["TokenFilters", "argmax", "logsumexp", "sample_categorical", "top_tokens"]
