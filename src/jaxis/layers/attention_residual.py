"""Attention residuals: a sub-block reads a mixture of earlier residuals, not their sum (Kimi K3, Inkling 2)."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxis.kernels.gates import softmax
from jaxis.layers.leaves import linear, rms_norm
from jaxis.layers.module import JaxModule
from jaxis.layers.norm import UnweightedRmsNorm
from jaxis.layers.scale import scaled
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


class NormedMixture(JaxModule):
    """Mixtures of a token's normed vectors, by softmaxes over `query(norm(x)) / sqrt(E)`: one for each query."""

    def __init__(self, scope: LayerScope, num_queries: int = 1) -> None:
        self.size: int = scope.config["hidden_size"]
        self.norm = UnweightedRmsNorm(epsilon=1e-6)
        self.query = linear(never_quantized(scope / "query"), self.size, num_queries, axes=(None, "embed"))

    def mixtures(self, x: jax.Array) -> list[jax.Array]:
        """Returns [T, E] of each query, for the vectors x [T, N, E]."""
        normed = self.norm(x.reshape(-1, self.size))
        scores = scaled(self.query(normed).astype(jnp.float32), self.size**-0.5).reshape(*x.shape[:2], -1)
        return [read_streams(normed.reshape(x.shape), softmax(scores[..., i])) for i in range(scores.shape[-1])]

    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns the first query's mixture [T, E]."""
        return self.mixtures(x)[0]
