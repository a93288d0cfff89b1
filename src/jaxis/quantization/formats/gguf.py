"""GGUF's block types: `weight` uint8 [out, bytes of a row], which keeps the precision of the file.

Q8_0 and Q4_0 become integers, MXFP4 what MXFP4 is here, all others codes. Source: see `gguf_blocks`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jaxis.kernels.weights import BlockScaledWeight, CodedWeight, QuantizedWeight, WeightValue, dequantize
from jaxis.layers.weight_format import TensorSpec
from jaxis.loading.gguf_block_types import BlockType
from jaxis.loading.headers import HeaderTensor
from jaxis.quantization.formats.bitnet import ternary_weight
from jaxis.quantization.formats.finite import check_finite
from jaxis.quantization.formats.gguf_blocks import LAYOUTS, Arrays

_BYTES_AT_ONCE = 4 << 20
_BYTE = (np.dtype(np.uint8),)
_FLOAT32 = (np.dtype(np.float32),)
# Any two are a finite float16, any one a scale of MXFP4; in no pattern that would make scales alike.
_SAMPLE = tuple(1 + 37 * i % 112 for i in range(112))


@dataclass(frozen=True)
class GGUFFormat:
    """`weight`, in blocks, and in some files, or after the blocks, `scale`, one float that multiplies it."""

    block_type: BlockType
    has_scale: bool = False

    def tensors(self, shape: tuple[int, ...]) -> Mapping[str, TensorSpec]:
        specs = {"weight": TensorSpec(self.block_type.stored_shape(shape), _BYTE, sample=_SAMPLE)}
        return specs | {"scale": TensorSpec((), _FLOAT32, other_shapes=((1,),))} if self.has_scale else specs

    def assemble(self, tensors: Mapping[str, np.ndarray], shape: tuple[int, ...]) -> WeightValue:
        scale = float(tensors["scale"].reshape(())) if self.has_scale else None
        return read_blocks(self.block_type, tensors["weight"], shape, scale)


@dataclass(frozen=True)
class LatentHeadsFormat:
    """The projection of latents to keys and values, in two tensors, as in files for absorbed attention.

    `k_b` [H, L, N] and `v_b` [H, V, L] are what `kv_b_proj` [H * (N + V), L] has below each other for each head, the
    first transposed. Blocks lie along the last axis, so the two have no common quantized form: the weight is float32.
    """

    key_type: BlockType
    value_type: BlockType
    num_heads: int
    key_dim: int

    def tensors(self, shape: tuple[int, ...]) -> Mapping[str, TensorSpec]:
        return {
            "k_b": self._spec(self.key_type, (shape[1], self.key_dim)),
            "v_b": self._spec(self.value_type, (self._value_dim(shape), shape[1])),
        }

    def assemble(self, tensors: Mapping[str, np.ndarray], shape: tuple[int, ...]) -> np.ndarray:
        keys = dequantized(self.key_type, tensors["k_b"]).swapaxes(1, 2)
        values = dequantized(self.value_type, tensors["v_b"])
        return np.concatenate([keys, values], axis=1).reshape(shape)

    def _value_dim(self, shape: tuple[int, ...]) -> int:
        return shape[0] // self.num_heads - self.key_dim

    def _spec(self, block_type: BlockType, shape: tuple[int, int]) -> TensorSpec:
        dtypes = _BYTE if block_type.dtype is None else (block_type.dtype,)
        return TensorSpec((self.num_heads, *block_type.stored_shape(shape)), dtypes)


def dequantized(block_type: BlockType, tensor: Any) -> Any:
    """Returns the elements of a tensor of the file, float32 [..., in], from plain floats or [..., bytes of a row].

    A JAX array, of rows that a program has read, becomes one.
    """
    if block_type.dtype is not None:
        return tensor.astype(np.float32)
    *outer, nbytes = tensor.shape
    shape = (*outer, nbytes // block_type.nbytes * block_type.elements)
    if isinstance(tensor, HeaderTensor):
        return HeaderTensor.of(shape, np.float32)
    rows = tensor.reshape(-1, nbytes)
    if isinstance(tensor, jax.Array):
        arrays = LAYOUTS[block_type.name].take_apart(rows.reshape(len(rows), -1, block_type.nbytes))
        return dequantize(_weight_of(block_type, arrays)).reshape(shape)
    return np.asarray(dequantize(read_blocks(block_type, rows, (len(rows), shape[-1])))).reshape(shape)


def read_blocks(
    block_type: BlockType, rows: np.ndarray, shape: tuple[int, ...], tensor_scale: float | None = None
) -> WeightValue:
    """Returns a weight [out, in] of host arrays, from the rows' bytes uint8 [out, bytes of a row].

    `tensor_scale` multiplies a weight of codes, or a ternary one. Raises ValueError, whose message follows "a weight",
    if scales are not finite.
    """
    layout = LAYOUTS[block_type.name]
    arrays = _in_chunks(layout.take_apart, rows.reshape(shape[0], -1, block_type.nbytes))
    if "numbers" in arrays:
        return ternary_weight(arrays["numbers"], 1.0 if tensor_scale is None else tensor_scale)
    if "codes" in arrays and tensor_scale is not None:
        arrays["super_scale"] = np.full((shape[0], 1), tensor_scale, np.float32)
    weight = _weight_of(block_type, arrays)
    if isinstance(weight, BlockScaledWeight):
        check_finite(weight)
    for name in ("scale", "minimum", "super_scale", "super_minimum"):
        array = arrays.get(name)
        if array is not None and array.dtype.kind == "f" and not np.isfinite(array).all():
            raise ValueError("whose scales are not all finite")
    return weight


def _weight_of(block_type: BlockType, arrays: Arrays) -> WeightValue:
    layout = LAYOUTS[block_type.name]
    if "qvalue" in arrays:
        return QuantizedWeight(**arrays)
    if "value" in arrays:
        return BlockScaledWeight(**arrays, block_shape=(1, block_type.elements))
    return CodedWeight(**arrays, bits=layout.bits, offset=layout.offset, levels=layout.levels)


def _in_chunks(take_apart: Callable[[np.ndarray], Arrays], blocks: np.ndarray) -> Arrays:
    """Takes some rows apart at a time, so that intermediate arrays stay small, and returns the arrays of all rows."""
    step = max(1, _BYTES_AT_ONCE // max(1, blocks[:1].nbytes))
    whole: Arrays = {}
    for first in range(0, len(blocks), step):
        for name, part in take_apart(blocks[first : first + step]).items():
            if name not in whole:
                whole[name] = np.empty((len(blocks), *part.shape[1:]), part.dtype)
            whole[name][first : first + step] = part
    return whole
