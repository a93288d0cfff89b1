"""Attention residuals: a sub-block reads a mixture of the residual's earlier blocks instead of their sum (Kimi K3)."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxis.kernels.gates import softmax
from jaxis.layers.leaves import linear, rms_norm
from jaxis.layers.module import JaxModule
from jaxis.layers.scope import LayerScope, never_quantized
from jaxis.layers.streams import read_streams


class BlockMixture(JaxModule):
    """Mixture of a token's vectors, by a softmax over `proj(norm(x))`, one number for each vector."""

    def __init__(self, scope: LayerScope) -> None:
        self.norm = rms_norm(scope / "norm")
        self.proj = linear(never_quantized(scope / "proj"), scope.config["hidden_size"], 1, axes=(None, "embed"))

    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns [T, E] for the vectors x [T, N, E]."""
        num_tokens, num_vectors, size = x.shape
        if num_vectors == 1:
            return x[:, 0]
        scores = self.proj(self.norm(x.reshape(-1, size))).astype(jnp.float32)
        return read_streams(x, softmax(scores.reshape(num_tokens, num_vectors)))
