"""Gated units with sparse activations: only gates far above the mean of their token pass (Gemma 3n)."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxis.kernels.materialize import materialize
from jaxis.kernels.norms import row_moments
from jaxis.layers.glu import GLU


@dataclass(frozen=True)
class GaussianTopK:
    """Computes `max(x - cutoff, 0)` with the quantile `sparsity` of a normal distribution with x's moments as cutoff.

    `sparsity` is the share of a token's features that become 0 if they are normally distributed; from 0 to 1,
    exclusive.
    """

    sparsity: float

    def __call__(self, x: jax.Array) -> jax.Array:
        """x [..., F] -> the same shape and type."""
        mean, variance = row_moments(x)
        deviations = statistics.NormalDist().inv_cdf(self.sparsity)
        # Rounded, so that no product is fused with the sum.
        cutoff = mean + materialize(jnp.sqrt(variance) * deviations)
        return jax.nn.relu(x.astype(jnp.float32) - cutoff).astype(x.dtype)


@dataclass(frozen=True)
class SparseGLU(GLU):
    """Computes `activation(top_k(gate)) * up`."""

    top_k: GaussianTopK

    def __call__(self, gate: jax.Array, up: jax.Array) -> jax.Array:
        return super().__call__(self.top_k(gate), up)

    @property
    def kernel_arguments(self) -> Mapping[str, Any] | None:
        return None
