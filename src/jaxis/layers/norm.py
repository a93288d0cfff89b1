"""Normalisation layers."""

from __future__ import annotations

from typing import Protocol

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from jaxis.kernels.layer_norm import layer_norm
from jaxis.kernels.rms_norm import rms_norm
from jaxis.layers.module import JaxModule, make_parameter


class Norm(Protocol):
    """A normalisation layer."""

    def __call__(self, x: jax.Array) -> jax.Array:
        """x -> the same shape and type."""
        ...


class JaxRmsNorm(JaxModule):
    """Root-mean-square norm over the last axis, computed in float32 (arXiv:1910.07467).

    Args:
      num_features: Size of the last axis.
      epsilon: Added to the mean square.
      rngs: For the initial weight.
      dtype: Data type of the weight.
      add_unit_offset: The checkpoint has `weight - 1` (Gemma).
    """

    def __init__(
        self,
        num_features: int,
        rngs: nnx.Rngs,
        *,
        epsilon: float,
        dtype: DTypeLike = jnp.float32,
        add_unit_offset: bool = False,
    ) -> None:
        self.epsilon = epsilon
        self.add_unit_offset = add_unit_offset
        init = nnx.initializers.zeros if add_unit_offset else nnx.initializers.ones
        self.weight = make_parameter(rngs, init, (num_features,), dtype, axes=(None,))

    @property
    def scale(self) -> jax.Array:
        """The factor that multiplies the normalised features: [num_features]."""
        weight = self.weight[...]
        # In float32, so that 1 + weight keeps its precision.
        return 1.0 + weight.astype(jnp.float32) if self.add_unit_offset else weight

    def __call__(self, x: jax.Array) -> jax.Array:
        """x [..., num_features] -> the same shape and type."""
        return rms_norm(x, self.scale, epsilon=self.epsilon)


class JaxLayerNorm(JaxModule):
    """Layer norm over the last axis, computed in float32 (arXiv:1607.06450).

    Args:
      shape: The weight's: the last axis's size, or [M, N] if each of M rows of N features has its own weights.
      rngs: For the initial weights.
      epsilon: Added to the variance.
      use_bias: Whether there is a `bias` of the same shape.
      dtype: Data type of the weights.
    """

    def __init__(
        self,
        shape: int | tuple[int, ...],
        rngs: nnx.Rngs,
        *,
        epsilon: float,
        use_bias: bool = True,
        dtype: DTypeLike = jnp.float32,
    ) -> None:
        self.epsilon = epsilon
        shape = (shape,) if isinstance(shape, int) else shape
        axes = (None,) * len(shape)
        self.weight = make_parameter(rngs, nnx.initializers.ones, shape, dtype, axes=axes)
        self.bias = make_parameter(rngs, nnx.initializers.zeros, shape, dtype, axes=axes) if use_bias else None

    def __call__(self, x: jax.Array) -> jax.Array:
        """x [..., *shape] -> the same shape and type."""
        bias = None if self.bias is None else self.bias[...]
        return layer_norm(x, self.weight[...], bias, epsilon=self.epsilon)
