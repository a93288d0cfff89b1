from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any, Self

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.typing import DTypeLike

from jaxis.kernels.grouped_matmul.stored import StoredStack
from jaxis.kernels.weights.packed_format import GROUP_SIZES, PackedFormat, PanelSources
from jaxis.kernels.weights.packed_weight import PackedWeight, pack_panels
from jaxis.kernels.weights.rows import gather_rows, padded_rows
from jaxis.kernels.weights.weight import Allocate, Weight


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class BlockScaledWeight(Weight):
    """A weight [..., out, in] of fp8 (e4m3) or MXFP4 (e2m1) as `value * scale of its block`; inputs are not quantized.

    Attributes:
      value: float8_e4m3fn [..., out, in]; or uint8 [..., out, in / 2], two e2m1 elements per byte, the earlier in the
        low half (OCP Microscaling Formats 1.0).
      scale: [..., ceil(out / rows), ceil(in / columns)], of any float type (float8_e8m0fnu: powers of two); blocks at
        the edges may be cut off.
      block_shape: (rows, columns) of a block.
    """

    value: jax.Array | np.ndarray
    scale: jax.Array | np.ndarray
    block_shape: tuple[int, int] = field(metadata={"static": True})

    @property
    def qtype(self) -> str:
        return "float4_e2m1fn" if self.value.dtype == np.uint8 else "float8_e4m3fn"

    @property
    def shape(self) -> tuple[int, ...]:
        *leading, columns = self.value.shape
        return (*leading, 2 * columns if self.qtype == "float4_e2m1fn" else columns)

    @property
    def storage(self) -> str:
        return self.qtype

    @property
    def column_major_arrays(self) -> frozenset[str]:
        # Blocks of several rows have few scales; kernels read whole rows of them.
        return frozenset() if self.block_shape[0] > 1 else frozenset({"scale"})

    def matmul(self, x: jax.Array, preferred_element_type: DTypeLike | None = None) -> jax.Array:
        dense = self.dequantize(x.dtype)
        return jnp.einsum("...i,oi->...o", x, dense, preferred_element_type=preferred_element_type)

    def dequantize(self, dtype: DTypeLike = jnp.float32) -> jax.Array:
        value = jnp.asarray(self.value)
        elements = decode_e2m1(value) if self.qtype == "float4_e2m1fn" else value.astype(jnp.float32)
        rows, columns = self.shape[-2:]
        scale = jnp.asarray(self.scale).astype(jnp.float32)
        scale = jnp.repeat(scale, self.block_shape[0], axis=-2)[..., :rows, :]
        scale = jnp.repeat(scale, self.block_shape[1], axis=-1)[..., :columns]
        return (elements * scale).astype(dtype)

    def lookup(self, ids: jax.Array, dtype: DTypeLike) -> jax.Array:
        rows, columns = self.block_shape
        ids = jnp.clip(ids, 0, self.shape[0] - 1)
        value, scale = gather_rows(self.value, ids), gather_rows(self.scale, ids // rows)
        return BlockScaledWeight(value, scale, (1, columns)).dequantize(dtype)

    def take_rows(self, rows: np.ndarray) -> BlockScaledWeight:
        """Returns these rows; blocks are cut where `rows` cuts them."""
        block_rows, block_columns = self.block_shape
        value = jnp.take(jnp.asarray(self.value), rows, axis=0)
        if self.scale.shape[0] == 1:  # one scale for all
            return BlockScaledWeight(value, self.scale, (max(block_rows, len(rows)), block_columns))
        # Each run of neighbouring rows consists of whole pieces of this size.
        begins = np.flatnonzero(np.diff(rows, prepend=-2) != 1)
        piece = math.gcd(block_rows, len(rows), *begins.tolist(), *rows[begins].tolist())
        scale = jnp.take(jnp.asarray(self.scale), rows[::piece] // block_rows, axis=0)
        return BlockScaledWeight(value, scale, (piece, block_columns))

    def with_rows(self, num_rows: int) -> BlockScaledWeight:
        """Appends rows of zeros with the scales of the last rows: scales of some types cannot be zero."""
        block_rows, block_columns = self.block_shape
        value = padded_rows(self.value, num_rows)
        if self.scale.shape[0] == 1:  # one scale for all
            return BlockScaledWeight(value, self.scale, (max(block_rows, num_rows), block_columns))
        return BlockScaledWeight(value, padded_rows(self.scale, -(-num_rows // block_rows), "edge"), self.block_shape)

    def with_whole_blocks(self, parts: tuple[int, int]) -> Self:
        """Makes blocks smaller that would be cut, such as 128 x 128 with rows on 64 devices, and repeats scales."""
        if self.block_shape[0] == 1:
            return self
        scale, blocks = self.scale, list(self.block_shape)
        for axis, number in enumerate(parts):
            size = self.shape[axis]
            if number == 1 or size % number or scale.shape[axis] == 1:
                continue
            smaller = math.gcd(blocks[axis], size // number)
            library: Any = jnp if isinstance(scale, jax.Array) else np
            scale = library.repeat(scale, blocks[axis] // smaller, axis=axis)
            scale = scale[tuple(slice(-(-size // smaller)) if i == axis else slice(None) for i in range(2))]
            blocks[axis] = smaller
        return dataclasses.replace(self, scale=scale, block_shape=(blocks[0], blocks[1]))

    def kernel_stack(self) -> StoredStack | None:
        kind = {"float8_e4m3fn": "e4m3", "float4_e2m1fn": "e2m1"}[self.qtype]
        rows, columns = (min(sizes) for sizes in zip(self.block_shape, self.shape[-2:], strict=True))
        if kind == "e2m1" and columns % 2:
            return None
        return StoredStack(self.value, self.scale, kind=kind, block_shape=(rows, columns))

    def pack(self, dtype: DTypeLike = jnp.float32, allocate: Allocate | None = None) -> PackedWeight | None:
        """Packs the weight. Elements keep their values; the scales of fp8 become float32."""
        (block_rows, block_columns), (rows, columns) = self.block_shape, self.shape
        scale = np.asarray(self.scale)
        if self.qtype == "float4_e2m1fn":
            is_whole = columns % block_columns == 0 and block_columns in GROUP_SIZES
            if block_rows != 1 or not is_whole or scale.dtype != ml_dtypes.float8_e8m0fnu:
                return None
        elif block_columns % 2:
            return None
        else:
            scale = np.repeat(scale.astype(np.float32), block_rows, axis=0)[:rows]
        weight_format = PackedFormat(self.qtype, columns, block_columns)
        return pack_panels(rows, weight_format, PanelSources(np.asarray(self.value), scale), allocate)


def scale_shape(shape: tuple[int, ...], block_shape: tuple[int, int]) -> tuple[int, ...]:
    """Returns the shape of `BlockScaledWeight.scale` for a weight of this shape in these blocks."""
    *leading, rows, columns = shape
    return (*leading, -(-rows // block_shape[0]), -(-columns // block_shape[1]))


def decode_e2m1(pairs: jax.Array) -> jax.Array:
    """Decodes uint8 [..., n] with two elements per byte to float32 [..., 2 n]."""
    code = jnp.stack([pairs & 0xF, pairs >> 4], axis=-1).reshape(*pairs.shape[:-1], -1).astype(jnp.int32)
    magnitude, exponent, mantissa = code & 7, (code >> 1) & 3, code & 1
    # Twice the magnitude is an integer: 0, 1, 2, 3, 4, 6, 8, 12.
    twice = jnp.where(exponent == 0, magnitude, (2 + mantissa) << jnp.maximum(exponent - 1, 0))
    # Multiplying applies the sign: the code for -0 gives a zero of either sign, which no product can tell apart.
    return twice.astype(jnp.float32) * jnp.where(code < 8, 0.5, -0.5)
