"""Chunks of a paged context: their blocks, and an online softmax over all chunks (arXiv:2205.14135)."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax


class OnlineSoftmax(NamedTuple):
    """A softmax-weighted sum, accumulated chunk by chunk in float32.

    Attributes:
      peak, total: [...], the largest score so far, and the sum of weights relative to it.
      values: [..., D], the sum of weighted values.
      correction: [...], the factor by which the last chunk rescaled the earlier sums.
    """

    peak: jax.Array
    total: jax.Array
    values: jax.Array
    correction: jax.Array

    @classmethod
    def empty(cls, shape: tuple[int, ...], head_dim: int) -> OnlineSoftmax:
        zeros = jnp.zeros(shape, jnp.float32)
        return cls(jnp.full(shape, -jnp.inf, jnp.float32), zeros, jnp.zeros((*shape, head_dim), jnp.float32), zeros)

    def add_scores(self, scores: jax.Array) -> tuple[OnlineSoftmax, jax.Array]:
        """Adds scores [..., S], -inf where masked -> the new sums, and the weights [..., S] of the chunk's values."""
        peak = jnp.maximum(self.peak, jnp.max(scores, axis=-1))
        # A query that has seen nothing yet has a peak of -inf; -inf - -inf would be NaN.
        finite_peak = jnp.where(jnp.isfinite(peak), peak, 0.0)
        weights = jnp.exp(scores - finite_peak[..., None])
        correction = jnp.exp(self.peak - finite_peak)
        total = self.total * correction + jnp.sum(weights, axis=-1)
        return OnlineSoftmax(peak, total, self.values, correction), weights

    def add_values(self, weighted: jax.Array) -> OnlineSoftmax:
        """Adds the chunk's values [..., D], summed with the weights from `add_scores`."""
        return self._replace(values=self.values * self.correction[..., None] + weighted)

    def output(self, sinks: jax.Array | None) -> jax.Array:
        """Returns [..., D], 0 where nothing was visible; `sinks` are broadcast to [...]."""
        values, total = self.values, self.total
        if sinks is not None:
            peak = jnp.maximum(self.peak, sinks)
            correction = jnp.exp(self.peak - peak)
            values, total = values * correction[..., None], total * correction + jnp.exp(sinks - peak)
        return values / jnp.maximum(total, jnp.finfo(jnp.float32).tiny)[..., None]


def biases(bias: jax.Array, distance: jax.Array) -> jax.Array:
    """Returns what is added to scores, float32 [..., H, S], for `bias` [..., H, N] and distances of keys [..., S].

    It is 0 of keys N tokens before and further, and of those after a query.
    """
    index = jnp.clip(distance, 0, bias.shape[-1] - 1)[..., None, :]
    found = jnp.take_along_axis(bias, index, axis=-1).astype(jnp.float32)
    return jnp.where(index == distance[..., None, :], found, 0)


def whole_chunks(block_tables: jax.Array, block_size: int, chunk_tokens: int) -> tuple[int, jax.Array]:
    """Returns tokens per chunk (a multiple of the block size), and tables [..., max_blocks] padded to whole chunks."""
    max_blocks = block_tables.shape[-1]
    blocks = max(1, min(chunk_tokens // block_size, max_blocks))
    padding = [(0, 0)] * (block_tables.ndim - 1) + [(0, -max_blocks % blocks)]
    return blocks * block_size, jnp.pad(block_tables, padding)


def blocks_of_chunk(block_tables: jax.Array, chunk: jax.Array, blocks: int) -> jax.Array:
    """Returns the entries [..., blocks] of one chunk in tables padded by `whole_chunks`."""
    return lax.dynamic_slice_in_dim(block_tables, chunk * blocks, blocks, axis=-1)


def product(subscripts: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """Computes `jnp.einsum` in float32. TPUs would else round float32 to bfloat16: before the loop, a whole cache."""
    precision = lax.Precision.HIGHEST if a.dtype == b.dtype == jnp.float32 else None
    return jnp.einsum(subscripts, a, b, precision=precision, preferred_element_type=jnp.float32)
