"""Factors: constant ones, and those of queries by their position."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

# Products with a constant.


def scaled(x: jax.Array, factor: float) -> jax.Array:
    """`x * factor` in x's type: multiplied in float32 and rounded once, so that the factor itself is not rounded."""
    return x if factor == 1 else (x.astype(jnp.float32) * factor).astype(x.dtype)


# A factor of queries that grows with their position.


@dataclass(frozen=True)
class QueryScale:
    """Queries at position p are multiplied by `1 + beta * log(1 + floor((p + offset) / interval))` (arXiv:2501.19399).

    Attributes:
      beta: How fast the factor grows.
      interval: Positions that share a factor.
      max_position: The last position; factors stay what they are there. They are a table, which gives a position the
        same factor in every batch.
      offset: Added to positions.
    """

    beta: float
    interval: int
    max_position: int
    offset: int = 0

    def __call__(self, q: jax.Array, positions: jax.Array) -> jax.Array:
        """q [T, H, D] at positions [T] -> [T, H, D] in q's type."""
        num_factors = (self.max_position + self.offset) // self.interval + 1
        factors = (1 + self.beta * np.log1p(np.arange(num_factors, dtype=np.float32))).astype(np.float32)
        factor = jnp.take(factors, (positions + self.offset) // self.interval, mode="clip")
        return (q * factor[:, None, None]).astype(q.dtype)
