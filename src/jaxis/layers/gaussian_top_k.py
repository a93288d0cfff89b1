"""Sparse activations: only those far above the mean of their token pass (Gemma 3n)."""

from __future__ import annotations

import dataclasses
import statistics

import jax
import jax.numpy as jnp

from jaxis.kernels.materialize import materialize
from jaxis.kernels.row_moments import row_moments


@dataclasses.dataclass(frozen=True)
class GaussianTopK:
    """`max(x - cutoff, 0)`, where the cutoff is the quantile `sparsity` of a normal distribution with x's moments.

    Attributes:
      sparsity: The share of a token's features that become 0 if they are normally distributed; from 0 to 1, exclusive.
    """

    sparsity: float

    def __call__(self, x: jax.Array) -> jax.Array:
        """x [..., F] -> the same shape and type."""
        mean, variance = row_moments(x)
        deviations = statistics.NormalDist().inv_cdf(self.sparsity)
        # Rounded, so that no product is fused with the sum.
        cutoff = mean + materialize(jnp.sqrt(variance) * deviations)
        return jax.nn.relu(x.astype(jnp.float32) - cutoff).astype(x.dtype)
