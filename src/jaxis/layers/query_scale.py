from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np


@dataclass(frozen=True)
class QueryScale:
    """Multiplies queries at position p by `1 + beta * log(1 + floor((p + offset) / interval))` (arXiv:2501.19399).

    The factor is constant after `max_position`. Factors are a table, which gives a position the same factor in every
    batch.
    """

    beta: float
    interval: int
    max_position: int
    offset: int = 0

    def __call__(self, q: jax.Array, positions: jax.Array) -> jax.Array:
        """Returns [T, H, D] in q's type for q [T, H, D] at positions [T]."""
        num_factors = (self.max_position + self.offset) // self.interval + 1
        factors = (1 + self.beta * np.log1p(np.arange(num_factors, dtype=np.float32))).astype(np.float32)
        factor = jnp.take(factors, (positions + self.offset) // self.interval, mode="clip")
        return (q * factor[:, None, None]).astype(q.dtype)
