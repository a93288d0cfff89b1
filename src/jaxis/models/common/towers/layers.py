"""Parts of vision towers outside attention: embeddings of patches, feed-forward blocks, merging.

Shapes are [P, C] for P patches of C features, with F features inside a feed-forward block. `patch_size` counts pixels
of a side of a patch.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxis.errors import ConfigError
from jaxis.kernels.weights import matmul
from jaxis.layers.leaves import linear
from jaxis.layers.linear import DEFAULT_INIT
from jaxis.layers.mlp import activation_function
from jaxis.layers.module import JaxModule, make_parameter
from jaxis.layers.scope import LayerScope

MakeNorm = Callable[..., Any]
"""`layer_norm` or `rms_norm`."""


class PatchConvolution(JaxModule):
    """A convolution without overlap: a product with each patch, plus a `bias` [C] if there is one.

    Args:
      num_features: C.
      patch_size: Pixels of a side of a patch.
      channels: Features of a pixel.
      num_frames: Frames of a kernel [C, 3, frames, patch, patch], where an image counts as equal frames; None for
        kernels [C, 3, patch, patch].
      is_flat: True if kernels are rows of a matrix in checkpoints.
      has_frames_first: True if such a row has all channels of a frame together, otherwise all frames of a channel.
      use_bias: True for a bias.
    """

    def __init__(
        self,
        scope: LayerScope,
        num_features: int,
        patch_size: int,
        *,
        channels: int = 3,
        num_frames: int | None = None,
        is_flat: bool = False,
        has_frames_first: bool = False,
        use_bias: bool = False,
    ) -> None:
        self.channels, self.num_frames, self.has_frames_first = channels, num_frames, has_frames_first
        self.shape = (channels, *([] if num_frames is None else [num_frames]), patch_size, patch_size)
        if has_frames_first:
            self.shape = (self.shape[1], channels, patch_size, patch_size)
        self.weight = parameter(scope, num_features, *([math.prod(self.shape)] if is_flat else self.shape))
        self.bias = parameter(scope, num_features) if use_bias else None

    def __call__(self, pixels: jax.Array) -> jax.Array:
        """pixels [P, patch * patch * 3 * frames], channels last (of an image, [P, patch * patch * 3]) -> [P, C]."""
        kernels = self.weight[...].reshape(-1, *self.shape)
        num_features, *_, patch_size = kernels.shape
        if self.num_frames is not None:
            frame_axis = 1 if self.has_frames_first else 2
            if pixels.shape[-1] == self.channels * patch_size**2:
                kernels = jnp.sum(kernels.astype(jnp.float32), axis=frame_axis).astype(pixels.dtype)
            else:
                kernels = kernels if self.has_frames_first else jnp.swapaxes(kernels, 1, 2)
                kernels = kernels.reshape(num_features, -1, patch_size, patch_size)
        product = matmul(pixels, kernels.transpose(0, 2, 3, 1).reshape(num_features, -1))
        return product if self.bias is None else product + self.bias[...]


class VisionMLP(JaxModule):
    """`fc2(act(fc1(x)))`. Raises ConfigError if the activation is unknown."""

    def __init__(
        self, scope: LayerScope, num_features: int, intermediate_size: int, activation: str, *, use_bias: bool = True
    ) -> None:
        into, out = ("mlp", "embed"), ("embed", "mlp")
        self.fc1 = linear(scope / "fc1", num_features, intermediate_size, axes=into, use_bias=use_bias)
        self.act = activation_function(activation)
        self.fc2 = linear(scope / "fc2", intermediate_size, num_features, axes=out, use_bias=use_bias)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.fc2(self.act(self.fc1(x)))


def merged(x: jax.Array, num_merged: int, *, by_feature: bool = False) -> jax.Array:
    """Joins adjacent patches [P, C] -> [P / num_merged, C * num_merged], sorted by patch, or by feature."""
    if not by_feature:
        return x.reshape(x.shape[0] // num_merged, -1)
    grouped = x.reshape(-1, num_merged, x.shape[-1]).swapaxes(1, 2)
    return grouped.reshape(grouped.shape[0], -1)


def averaged(x: jax.Array, num_merged: int) -> jax.Array:
    """Averages adjacent patches [P, C] -> [P / num_merged, C]."""
    return jnp.mean(x.reshape(-1, num_merged, x.shape[-1]).astype(jnp.float32), axis=1).astype(x.dtype)


def vision_scope(scope: LayerScope) -> LayerScope:
    """Returns the scope of a tower, whose config is the checkpoint's `vision_config`."""
    model_config = dataclasses.replace(scope.vllm_config.model_config, hf_config=scope.config["vision_config"])
    return dataclasses.replace(scope, vllm_config=dataclasses.replace(scope.vllm_config, model_config=model_config))


def one_side(value: Any, source: str) -> int:
    """Returns a size that is given once or for both sides. Raises ConfigError if the sides differ."""
    sides = value if isinstance(value, list | tuple) else [value]
    if len(set(sides)) != 1 or not isinstance(sides[0], int):
        raise ConfigError(f"{source}: the vision tower has sides of {value!r}; expected a square")
    return sides[0]


def parameter(scope: LayerScope, *shape: int) -> nnx.Param:
    """A parameter that is replicated on every device."""
    return make_parameter(scope.rngs, DEFAULT_INIT, shape, scope.dtype, axes=(None,) * len(shape))
