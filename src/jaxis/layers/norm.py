"""Normalisation layers."""

from __future__ import annotations

from typing import Protocol

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from jaxis.kernels.gates import gated
from jaxis.kernels.materialize import materialize
from jaxis.kernels.norms import layer_norm, rms_norm, row_moments
from jaxis.layers.module import JaxModule, make_parameter


class Norm(Protocol):
    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalises x; the result has the same shape and type."""
        ...


class JaxRmsNorm(JaxModule):
    """Root-mean-square norm over the last axis, computed in float32 (arXiv:1910.07467).

    Args:
      epsilon: Added to the mean square.
      add_unit_offset: True if the checkpoint has `weight - 1` (Gemma).
      use_weight: True for a `weight`; without one, features are only normalised.
    """

    def __init__(
        self,
        num_features: int,
        rngs: nnx.Rngs,
        *,
        epsilon: float,
        dtype: DTypeLike = jnp.float32,
        add_unit_offset: bool = False,
        use_weight: bool = True,
    ) -> None:
        self.num_features = num_features
        self.epsilon = epsilon
        self.add_unit_offset = add_unit_offset
        self.dtype = dtype
        init = nnx.initializers.zeros if add_unit_offset else nnx.initializers.ones
        self.weight = make_parameter(rngs, init, (num_features,), dtype, axes=(None,)) if use_weight else None

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the last axes of an input."""
        return (self.num_features,)

    @property
    def scale(self) -> jax.Array:
        """Factor that multiplies the normalised features: [num_features]."""
        if self.weight is None:
            return jnp.ones(self.num_features, self.dtype)
        weight = self.weight[...]
        # In float32, so that 1 + weight keeps its precision.
        return 1.0 + weight.astype(jnp.float32) if self.add_unit_offset else weight

    def __call__(self, x: jax.Array) -> jax.Array:
        return rms_norm(x, self.scale, epsilon=self.epsilon)


class UnweightedRmsNorm(JaxModule):
    """Root-mean-square norm over the last axis, computed in float32, without parameters."""

    def __init__(self, *, epsilon: float) -> None:
        self.epsilon = epsilon

    def __call__(self, x: jax.Array) -> jax.Array:
        return rms_norm(x, jnp.ones(x.shape[-1], x.dtype), epsilon=self.epsilon)


class JaxLayerNorm(JaxModule):
    """Layer norm over the last axis, computed in float32 (arXiv:1607.06450).

    Args:
      shape: Shape of the weight: the last axis's size, or [M, N] if each of M rows of N features has its own weights.
      epsilon: Added to the variance.
      use_bias: True for a `bias` of the same shape.
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

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the last axes of an input."""
        return self.weight.get_value().shape

    def __call__(self, x: jax.Array) -> jax.Array:
        bias = None if self.bias is None else self.bias[...]
        return layer_norm(x, self.weight[...], bias, epsilon=self.epsilon)


class HeadLayerNorms(JaxModule):
    """Layer norms of H heads that are separate in the checkpoint, as `norms.0.weight` [D] and so on, without biases."""

    weight: None = None

    def __init__(
        self, num_heads: int, head_dim: int, rngs: nnx.Rngs, *, epsilon: float, dtype: DTypeLike = jnp.float32
    ) -> None:
        self.epsilon = epsilon
        self.norms = [
            JaxLayerNorm(head_dim, rngs, epsilon=epsilon, use_bias=False, dtype=dtype) for _ in range(num_heads)
        ]

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the last axes of an input, of which the first may be repeated."""
        return (len(self.norms), *self.norms[0].shape)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalises x [T, H, D]. Devices that repeat heads have several copies of each, one after the other."""
        weight = jnp.stack([norm.weight[...] for norm in self.norms])
        copies = x.shape[1] // len(self.norms)
        return layer_norm(x, jnp.repeat(weight, copies, axis=0), None, epsilon=self.epsilon)


class L2Clip(JaxModule):
    """Shortens the vectors of H heads, times `scale` [H, D] if there is one, to a length of at most `bound`."""

    weight: None = None

    def __init__(
        self, shape: tuple[int, int], rngs: nnx.Rngs, *, bound: float, use_scale: bool = True, dtype: DTypeLike
    ) -> None:
        self.shape, self.bound = shape, bound
        ones, axes = nnx.initializers.ones, ("heads", None)
        self.scale = make_parameter(rngs, ones, shape, dtype, axes=axes) if use_scale else None

    def __call__(self, x: jax.Array) -> jax.Array:
        """x [T, H, D] -> [T, H, D]."""
        y = x.astype(jnp.float32)
        if self.scale is not None:
            y = y * self.scale[...].astype(jnp.float32)
        length = jnp.sqrt(row_moments(y * y)[0] * y.shape[-1])
        return (y * jnp.minimum(self.bound / (length + 1e-6), 1)).astype(x.dtype)


class GatedHeadNorm(JaxModule):
    """Root-mean-square norm of each head, then a gate of each element: `norm(x) * activation(gate)`.

    `activation` is a key of `jaxis.kernels.gates.ACTIVATIONS`.
    """

    def __init__(
        self, head_dim: int, rngs: nnx.Rngs, *, epsilon: float, activation: str, dtype: DTypeLike = jnp.float32
    ) -> None:
        self.epsilon, self.activation = epsilon, activation
        self.weight = make_parameter(rngs, nnx.initializers.ones, (head_dim,), dtype, axes=(None,))

    def __call__(self, x: jax.Array, gate: jax.Array) -> jax.Array:
        """Returns [T, H * D] for x [T, H, D] and the gates' logits [T, H * D]."""
        normalised = rms_norm(x, self.weight[...], epsilon=self.epsilon)
        return gated(normalised.reshape(gate.shape), gate, self.activation)


class GatedRmsNorm(JaxModule):
    """Root-mean-square norm of `x * silu(gate)`, over each of `num_groups` equal groups of consecutive features."""

    def __init__(
        self, num_features: int, num_groups: int, rngs: nnx.Rngs, *, epsilon: float, dtype: DTypeLike = jnp.float32
    ) -> None:
        self.num_groups, self.epsilon = num_groups, epsilon
        self.weight = make_parameter(rngs, nnx.initializers.ones, (num_features,), dtype, axes=(None,))

    def __call__(self, x: jax.Array, gate: jax.Array) -> jax.Array:
        """Returns float32 [T, num_features] for x float32 and gate of the same shape."""
        x, weight = gated(x, gate, "silu"), self.weight[...]
        if self.num_groups == 1:
            return rms_norm(x, weight, epsilon=self.epsilon)
        groups = x.reshape(x.shape[0], self.num_groups, -1)
        normalised = rms_norm(groups, jnp.ones(groups.shape[-1], weight.dtype), epsilon=self.epsilon)
        return normalised.reshape(x.shape) * weight.astype(x.dtype)


def norm_each_group(x: jax.Array, norm: JaxRmsNorm) -> jax.Array:
    """Returns groups of features x [T, G, D], each divided by its own root mean square, times the weights [G D]."""
    normalised = rms_norm(x.astype(jnp.float32), jnp.ones(x.shape[-1], jnp.float32), epsilon=norm.epsilon)
    return materialize(normalised * norm.scale.reshape(x.shape[1:])).astype(x.dtype)
