"""Normalisation layers."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxis.kernels.rms_norm import rms_norm
from jaxis.layers.module import JaxModule, make_parameter


class JaxRmsNorm(JaxModule):
    """Root-mean-square norm over the last axis, computed in float32 (arXiv:1910.07467).

    Args:
      num_features: Size of the last axis.
      epsilon: Added to the mean square.
      rngs: For the initial weight.
      dtype: Data type of the weight.
    """

    def __init__(
        self,
        num_features: int,
        rngs: nnx.Rngs,
        *,
        epsilon: float,
        dtype: Any = jnp.float32,
    ) -> None:
        self.epsilon = epsilon
        self.weight = make_parameter(rngs, nnx.initializers.ones, (num_features,), dtype, axes=(None,))

    def __call__(self, x: jax.Array) -> jax.Array:
        """x [..., num_features] -> the same shape and type."""
        return rms_norm(x, self.weight[...], epsilon=self.epsilon)
