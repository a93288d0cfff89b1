from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxis.kernels.materialize import in_whole_vectors, materialize
from jaxis.layers.module import JaxModule, make_parameter
from jaxis.layers.scope import LayerScope


class ScalesQueries(Protocol):
    def __call__(self, q: jax.Array, positions: jax.Array) -> jax.Array:
        """Returns [T, H, D] in q's type for q [T, H, D] at positions [T]."""
        ...


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
        factors = (1 + self.beta * self.growth(np.arange(num_factors, dtype=np.float32))).astype(np.float32)
        factor = jnp.take(factors, (positions + self.offset) // self.interval, mode="clip")
        return (q * factor[:, None, None]).astype(q.dtype)

    def growth(self, steps: np.ndarray) -> np.ndarray:
        """Returns what `beta` multiplies, float32, for numbers of intervals."""
        return np.log1p(steps)


@dataclass(frozen=True)
class FlooredQueryScale(QueryScale):
    """Multiplies queries at position p by `1 + beta * log(max((p + 1) / floor, 1))`, with intervals of 1 (Inkling)."""

    floor: int = 1

    def growth(self, steps: np.ndarray) -> np.ndarray:
        return np.log(np.maximum((steps + 1) / np.float32(self.floor), 1))


class LogQueryScale(JaxModule):
    """Multiplies the queries of head h at position p by `s[h] * log(p + 1) + b[h]` (arXiv:2501.19399)."""

    def __init__(self, scope: LayerScope, num_heads: int) -> None:
        zeros, ones, shape = nnx.initializers.zeros, nnx.initializers.ones, (num_heads,)
        self.s = make_parameter(scope.rngs, zeros, shape, scope.dtype, axes=("heads",))
        self.b = make_parameter(scope.rngs, ones, shape, scope.dtype, axes=("heads",))

    def __call__(self, q: jax.Array, positions: jax.Array) -> jax.Array:
        """Returns [T, H, D] in q's type for q [T, H, D] at positions [T]."""
        logs = in_whole_vectors(jnp.log1p, positions.astype(jnp.float32))
        s, b = self.s[...].astype(jnp.float32), self.b[...].astype(jnp.float32)
        factors = materialize(materialize(logs[:, None] * s) + b)
        return (q * factors[:, :, None]).astype(q.dtype)
