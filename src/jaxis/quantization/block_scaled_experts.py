"""Layers of experts whose weights a checkpoint holds as narrow floats with a scale for each block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax import nnx

from jaxis.errors import CheckpointError
from jaxis.kernels.quantized_matmul import BlockScaledWeight
from jaxis.kernels.quantized_matmul.block_scaled import scale_shape
from jaxis.layers.expert_stacks import load_expert
from jaxis.quantization.block_scaled import BLOCK_SCALE_DTYPES, check_finite
from jaxis.quantization.experts import STACK_AXES, apply_stacks, stack_shape
from jaxis.quantization.stored import stored_parameter

if TYPE_CHECKING:
    from jaxis.layers.experts import JaxExperts
    from jaxis.quantization.config import ExpertsMethod

_BYTES_OF_A_GROUP = 16  # MXFP4: 32 numbers


@dataclass(frozen=True)
class BlockScaledExpertsMethod:
    """Each stack is a parameter whose value is a BlockScaledWeight; plain JAX widens the experts hit."""

    def create_weights(self, layer: JaxExperts, rngs: nnx.Rngs, dtype: Any) -> None:
        raise NotImplementedError("only a checkpoint has such weights: see StoredBlockExpertsMethod")

    def load_expert(self, layer: JaxExperts, stack_name: str, expert: int, tensor: np.ndarray) -> None:
        raise NotImplementedError("only a checkpoint has such weights: see StoredBlockExpertsMethod")

    def apply(self, layer: JaxExperts, x: jax.Array, expert_ids: jax.Array, expert_weights: jax.Array) -> jax.Array:
        return apply_stacks(layer, x, expert_ids, expert_weights)

    def process_weights_after_loading(self, layer: JaxExperts) -> None:
        """Nothing to repack."""


@dataclass(frozen=True)
class StoredStacks:
    """How a checkpoint holds the experts' narrow floats.

    Attributes:
      value_suffix, scale_suffix: What the parameters' names have after `gate_proj`, `up_proj` and `down_proj`.
      is_mxfp4: Values are uint8 [X, out, groups, 16] and scales uint8 [X, out, groups], the bits of e8m0; otherwise
        float8_e4m3fn [X, out, in] and a scale for each block.
      block_shape: (rows, columns) of a block.
    """

    value_suffix: str
    scale_suffix: str
    is_mxfp4: bool
    block_shape: tuple[int, int]

    @property
    def value_dtypes(self) -> tuple[Any, ...]:
        """Of the values in the file."""
        return (np.uint8,) if self.is_mxfp4 else (ml_dtypes.float8_e4m3fn,)

    @property
    def scale_dtypes(self) -> tuple[Any, ...]:
        """Of the scales in the file."""
        return (np.uint8, ml_dtypes.float8_e8m0fnu) if self.is_mxfp4 else BLOCK_SCALE_DTYPES

    def value_shape(self, shape: tuple[int, int, int]) -> tuple[int, ...]:
        """Of the values, for a stack of this shape [X, out, in]."""
        return (*scale_shape(shape, self.block_shape), _BYTES_OF_A_GROUP) if self.is_mxfp4 else shape

    def weight(self, value: jax.Array, scale: jax.Array) -> BlockScaledWeight:
        """Of the two parameters' values."""
        if self.is_mxfp4:
            value = value.reshape(*value.shape[:2], -1)
            if scale.dtype == jnp.uint8:
                scale = jax.lax.bitcast_convert_type(scale, jnp.float8_e8m0fnu)
        return BlockScaledWeight(value, scale, self.block_shape)


@dataclass(frozen=True)
class StoredBlockExpertsMethod:
    """Has stacks for each of the file's tensors; once they are loaded, each projection is one BlockScaledWeight.

    Attributes:
      stored: What the file's tensors are.
      method: Takes over once they are loaded.
    """

    stored: StoredStacks
    method: ExpertsMethod

    def create_weights(self, layer: JaxExperts, rngs: nnx.Rngs, dtype: Any) -> None:
        for name, axes in STACK_AXES.items():
            shape, stored = stack_shape(layer, name), self.stored
            value_shape = stored.value_shape(shape)
            value_axes = ("expert", *axes, *[None] * (len(value_shape) - len(shape)))
            value = stored_parameter(value_shape, stored.value_dtypes, value_axes)
            scale = stored_parameter(scale_shape(shape, stored.block_shape), stored.scale_dtypes, ("expert", *axes))
            setattr(layer, name + stored.value_suffix, value)
            setattr(layer, name + stored.scale_suffix, scale)

    def load_expert(self, layer: JaxExperts, stack_name: str, expert: int, tensor: np.ndarray) -> None:
        is_scale = stack_name.endswith(self.stored.scale_suffix)
        dtypes = [np.dtype(dtype) for dtype in (self.stored.scale_dtypes if is_scale else self.stored.value_dtypes)]
        if tensor.dtype not in dtypes:
            expected = " or ".join(map(str, dtypes))
            raise CheckpointError(f"is {tensor.dtype} in the checkpoint, but must be {expected} here")
        if tensor.dtype == ml_dtypes.float8_e8m0fnu and self.stored.is_mxfp4:
            tensor = tensor.view(np.uint8)
        load_expert(getattr(layer, stack_name), expert, tensor)

    def apply(self, layer: JaxExperts, x: jax.Array, expert_ids: jax.Array, expert_weights: jax.Array) -> jax.Array:
        raise NotImplementedError("process_weights_after_loading comes first")

    def process_weights_after_loading(self, layer: JaxExperts) -> None:
        """Puts BlockScaledWeights in the place of the file's stacks and hands the layer over."""
        for name, axes in STACK_AXES.items():
            names = [name + self.stored.value_suffix, name + self.stored.scale_suffix]
            weight = self.stored.weight(*(getattr(layer, each).get_value() for each in names))
            check_finite(weight, name)
            for each in names:
                delattr(layer, each)
            setattr(layer, name, nnx.Param(weight, logical_axes=("expert", *axes)))
        layer.quant_method = self.method
        self.method.process_weights_after_loading(layer)
