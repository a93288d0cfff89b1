"""Layers whose weights a checkpoint holds in the compressed-tensors format, and that format's bits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxis.errors import CheckpointError
from jaxis.kernels.quantized_matmul import QuantizedWeight
from jaxis.layers.weight_loader import check_loadable
from jaxis.loading.headers import reading_only_headers
from jaxis.quantization.methods import WeightScheme
from jaxis.quantization.stored import SCALE_DTYPES, stored_parameter

if TYPE_CHECKING:
    from jaxis.layers.embed import JaxEmbed
    from jaxis.layers.linear import JaxLinear
    from jaxis.quantization.config import LinearMethod

VALUES_PER_WORD = 8  # int4 values in an int32


@dataclass(frozen=True)
class CompressedTensorsMethod:
    """Has a parameter for each tensor of the file; once they are loaded, the layer is as if quantized online.

    Attributes:
      format: "int-quantized": `weight` int8 [out, in] and `weight_scale` [out, groups]. "pack-quantized":
        `weight_packed` int32 [out, in / 8], `weight_scale`, `weight_shape` [2], and, if asymmetric,
        `weight_zero_point` int32 [out / 8, groups].
      scheme: How the weight is quantized.
      method: Takes over once it is loaded.
    """

    format: str
    scheme: WeightScheme
    method: LinearMethod

    def create_weights(self, layer: JaxLinear | JaxEmbed, rngs: nnx.Rngs, dtype: Any) -> None:
        rows, columns = layer.output_size, layer.input_size
        groups = 1 if self.scheme.tile_size is None else columns // self.scheme.tile_size
        axes = layer.kernel_axes
        if self.format == "int-quantized":
            layer.weight = stored_parameter((rows, columns), [np.int8], axes)
        else:
            layer.weight_packed = stored_parameter((rows, -(-columns // VALUES_PER_WORD)), [np.int32], axes)
            layer.weight_shape = nnx.Param(
                jnp.zeros(2, jnp.int32), logical_axes=(None,), weight_loader=_ShapeLoader((rows, columns))
            )
            if self.scheme.weight_calibration_method == "minmax":
                shape = (-(-rows // VALUES_PER_WORD), groups)
                layer.weight_zero_point = stored_parameter(shape, [np.int32], (None, axes[1]))
        layer.weight_scale = stored_parameter((rows, groups), SCALE_DTYPES, axes)

    def apply(self, layer: JaxLinear | JaxEmbed, x: jax.Array, *, preferred_element_type: Any = None) -> jax.Array:
        raise NotImplementedError("process_weights_after_loading comes first")

    def lookup(self, layer: JaxEmbed, input_ids: jax.Array) -> jax.Array:
        raise NotImplementedError("process_weights_after_loading comes first")

    def process_weights_after_loading(self, layer: JaxLinear | JaxEmbed) -> None:
        """Puts a QuantizedWeight in the place of the file's parameters and hands the layer over."""
        scale = layer.weight_scale.get_value()
        if self.scheme.tile_size is None or scale.dtype == jnp.float16:
            scale = scale.astype(jnp.float32)
        zero_point = None
        if self.format == "int-quantized":
            qvalue = layer.weight.get_value()
        else:
            qvalue = _nibble_pairs(layer.weight_packed.get_value())[:, : layer.input_size // 2]
            if self.scheme.weight_calibration_method == "minmax":
                zero_point = unpack_rows(layer.weight_zero_point.get_value())[: layer.output_size]
                del layer.weight_zero_point
            del layer.weight_packed, layer.weight_shape
        del layer.weight_scale
        layer.weight = nnx.Param(QuantizedWeight(qvalue, scale, zero_point), logical_axes=layer.kernel_axes)
        layer.quant_method = self.method
        self.method.process_weights_after_loading(layer)


def pack_words(nibble_pairs: np.ndarray) -> np.ndarray:
    """uint8 [out, in / 2] of two numbers a byte, the earlier low -> int32 [out, ceil(in / 8)], likewise."""
    missing = -nibble_pairs.shape[1] % (VALUES_PER_WORD // 2)
    return np.ascontiguousarray(np.pad(nibble_pairs, ((0, 0), (0, missing)))).view("<i4")


def pack_rows(numbers: np.ndarray) -> np.ndarray:
    """uint8 [out, groups] of 0 to 15 -> int32 [ceil(out / 8), groups], the earliest row in the lowest bits."""
    rows, groups = numbers.shape
    padded = np.pad(numbers, ((0, -rows % VALUES_PER_WORD), (0, 0))).astype(np.uint32)
    shifts = 4 * np.arange(VALUES_PER_WORD, dtype=np.uint32)[:, None]
    words = np.bitwise_or.reduce(padded.reshape(-1, VALUES_PER_WORD, groups) << shifts, axis=1)
    return words.astype("<u4").view("<i4")


@jax.jit
def _nibble_pairs(words: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(words, jnp.uint8).reshape(len(words), -1)


@jax.jit
def unpack_rows(words: jax.Array) -> jax.Array:
    """What `pack_rows` packed, rows filled up to a multiple of 8."""
    shifts = 4 * jnp.arange(VALUES_PER_WORD, dtype=jnp.int32)[:, None]
    return ((words[:, None] >> shifts) & 0xF).astype(jnp.uint8).reshape(-1, words.shape[1])


@dataclass(frozen=True)
class _ShapeLoader:
    """A `weight_loader` of the shape that a packed weight has unpacked."""

    shape: tuple[int, int]

    def __call__(self, param: nnx.Param, tensor: np.ndarray, shard_id: str | int | None = None) -> None:
        check_loadable(param, tensor, shard_id)
        if reading_only_headers():
            param.set_value(tensor)
            return
        if tensor.tolist() != list(self.shape):
            raise CheckpointError(f"is {tensor.tolist()} in the checkpoint, {list(self.shape)} in the model")
        param.set_value(jnp.asarray(tensor, jnp.int32))
