"""Weights of low-precision floats with a scale for each block: fp8 (e4m3) and MXFP4 (e2m1)."""

from __future__ import annotations

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class BlockScaledWeight:
    """A weight [..., out, in] as `value * scale of its block`.

    Attributes:
      value: float8_e4m3fn [..., out, in]; or uint8 [..., out, in / 2], two e2m1 elements a byte, the earlier in the low
        half (OCP Microscaling Formats 1.0).
      scale: [..., ceil(out / rows), ceil(in / columns)], of any float type (float8_e8m0fnu: powers of two); blocks at
        the edges may be cut off.
      block_shape: (rows, columns) of a block.
    """

    value: jax.Array | np.ndarray
    scale: jax.Array | np.ndarray
    block_shape: tuple[int, int] = field(metadata={"static": True})

    @property
    def qtype(self) -> str:
        """ "float8_e4m3fn" or "float4_e2m1fn"."""
        return "float4_e2m1fn" if self.value.dtype == np.uint8 else "float8_e4m3fn"

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape (..., out, in) of the dequantized weight."""
        *leading, columns = self.value.shape
        return (*leading, 2 * columns if self.qtype == "float4_e2m1fn" else columns)

    @property
    def nbytes(self) -> int:
        """Bytes of both arrays."""
        return self.value.nbytes + self.scale.nbytes


def scale_shape(shape: tuple[int, ...], block_shape: tuple[int, int]) -> tuple[int, ...]:
    """The shape of `scale` for a weight of this shape in these blocks."""
    *leading, rows, columns = shape
    return (*leading, -(-rows // block_shape[0]), -(-columns // block_shape[1]))


def dequantize_blocks(weight: BlockScaledWeight, dtype: DTypeLike = jnp.float32) -> jax.Array:
    """The weight [..., out, in], computed in float32 and rounded once, to `dtype`."""
    value = jnp.asarray(weight.value)
    if weight.qtype == "float4_e2m1fn":
        wide = _widen_e2m1(value)
    else:
        wide = value.astype(jnp.float32)
    rows, columns = weight.shape[-2:]
    scale = jnp.asarray(weight.scale).astype(jnp.float32)
    scale = jnp.repeat(scale, weight.block_shape[0], axis=-2)[..., :rows, :]
    scale = jnp.repeat(scale, weight.block_shape[1], axis=-1)[..., :columns]
    return (wide * scale).astype(dtype)


def _widen_e2m1(pairs: jax.Array) -> jax.Array:
    """uint8 [..., n] of two elements a byte -> float32 [..., 2 n]."""
    code = jnp.stack([pairs & 0xF, pairs >> 4], axis=-1).reshape(*pairs.shape[:-1], -1).astype(jnp.int32)
    magnitude, exponent, mantissa = code & 7, (code >> 1) & 3, code & 1
    # Twice the magnitude is an integer: 0, 1, 2, 3, 4, 6, 8, 12.
    twice = jnp.where(exponent == 0, magnitude, (2 + mantissa) << jnp.maximum(exponent - 1, 0))
    # Multiplying applies the sign: the code for -0 gives a zero of either sign, which no product can tell apart.
    return twice.astype(jnp.float32) * jnp.where(code < 8, 0.5, -0.5)


def block_scaled_matmul(
    x: jax.Array, weight: BlockScaledWeight, *, preferred_element_type: DTypeLike | None = None
) -> jax.Array:
    """`x @ dequantize_blocks(weight, x.dtype).T`; the weight is dequantized on the fly, x is not quantized.

    Args:
      x: [..., in].
      weight: Stands for [out, in].
      preferred_element_type: Type of the result; None means x's.

    Returns:
      [..., out].
    """
    wide = dequantize_blocks(weight, x.dtype)
    return jnp.einsum("...i,oi->...o", x, wide, preferred_element_type=preferred_element_type)
