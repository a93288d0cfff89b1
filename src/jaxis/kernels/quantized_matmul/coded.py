"""Weights of low-bit codes: jaxis' own affine ones, and formats of 2 to 8 bits other than plain int8, int4 and fp8.

One type serves the block types of GGUF (K-quants, IQ4, Q4_1, ...), NF4, FP4, NVFP4, MLX, HQQ and others, which differ
in their number of bits, in what a code means and in how scales are stored.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxis.kernels.quantized_matmul.reference import round_activations

LOW_BITS = {2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 8: 8}
"""Bits of a code -> how many of them are in `codes`; the others are in `high`."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class CodedWeight:
    """A weight [..., out, in] whose elements are `scale * (value - zero_point) + minimum`.

    The value is `levels[code]` if there are levels, else `code - offset`. Every row has as many groups of neighbouring
    columns as `scale` has entries for it. Scales and minima may have two levels: that of a group is multiplied by that
    of the super-block of neighbouring groups around it. All of this is computed in float32.

    Attributes:
      codes: uint8 [..., out, in * LOW_BITS[bits] / 8]: the low bits of the codes, densely, earlier columns in lower
        bits.
      scale: [..., out, groups], of any type.
      high: uint8 [..., out, in * (bits - LOW_BITS[bits]) / 8]: the other bits of the codes in the same order; None if
        there are none.
      zero_point: [..., out, groups], of any type; None means 0.
      minimum: [..., out, groups], of any type; None means 0.
      super_scale: float32 or float16 [..., out, super-blocks], which multiplies `scale`; None means 1.
      super_minimum: The same for `minimum`.
      bits: Bits of a code: 2, 3, 4, 5, 6 or 8.
      offset: What is subtracted from a code.
      levels: The value of each code, instead of the code itself.
      act_qtype: "int8" quantizes the input of its products dynamically; None does not.
    """

    codes: jax.Array | np.ndarray
    scale: jax.Array | np.ndarray
    high: jax.Array | np.ndarray | None = None
    zero_point: jax.Array | np.ndarray | None = None
    minimum: jax.Array | np.ndarray | None = None
    super_scale: jax.Array | np.ndarray | None = None
    super_minimum: jax.Array | np.ndarray | None = None
    bits: int = field(default=4, metadata={"static": True})
    offset: int = field(default=0, metadata={"static": True})
    levels: tuple[float, ...] | None = field(default=None, metadata={"static": True})
    act_qtype: str | None = field(default=None, metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape (..., out, in) of the dequantized weight."""
        *leading, size = self.codes.shape
        return (*leading, size * 8 // LOW_BITS[self.bits])

    @property
    def group_size(self) -> int:
        """Columns that share a scale."""
        return self.shape[-1] // self.scale.shape[-1]

    @property
    def nbytes(self) -> int:
        """Bytes of all its arrays."""
        return sum(array.nbytes for array in jax.tree.leaves(self))


def dequantize_codes(weight: CodedWeight, dtype: DTypeLike = jnp.float32) -> jax.Array:
    """The weight [..., out, in], computed in float32 and rounded once, to `dtype`."""
    values = _values(weight).reshape(*weight.scale.shape, -1)
    scale = _two_levels(weight.scale, weight.super_scale)
    if weight.zero_point is not None:
        values = values - jnp.asarray(weight.zero_point).astype(jnp.float32)[..., None]
    values = values * scale[..., None]
    if weight.minimum is not None:
        values = values + _two_levels(weight.minimum, weight.super_minimum)[..., None]
    return values.reshape(weight.shape).astype(dtype)


def coded_matmul(x: jax.Array, weight: CodedWeight, *, preferred_element_type: DTypeLike | None = None) -> jax.Array:
    """`x @ dequantize_codes(weight, x.dtype).T`, with x quantized first if the weight has an `act_qtype`.

    Args:
      x: [..., in].
      weight: Stands for [out, in].
      preferred_element_type: Type of the result; None means x's.

    Returns:
      [..., out].
    """
    x = round_input_of_codes(x, weight)
    wide = dequantize_codes(weight, x.dtype)
    return jnp.einsum("...i,oi->...o", x, wide, preferred_element_type=preferred_element_type)


def round_input_of_codes(x: jax.Array, weight: CodedWeight) -> jax.Array:
    """x [..., in], quantized for the product with this weight and dequantized again, in x's type."""
    return x if weight.act_qtype is None else round_activations(x)


def _values(weight: CodedWeight) -> jax.Array:
    """What the codes mean, as float32 [..., out, in]."""
    low_bits = LOW_BITS[weight.bits]
    codes = _unpack(jnp.asarray(weight.codes), low_bits)
    if weight.high is not None:
        codes = codes | (_unpack(jnp.asarray(weight.high), weight.bits - low_bits) << low_bits)
    if weight.levels is None:
        return codes.astype(jnp.float32) - weight.offset
    return jnp.take(jnp.asarray(weight.levels, jnp.float32), codes.astype(jnp.int32), axis=0)


def _unpack(packed: jax.Array, bits: int) -> jax.Array:
    """uint8 [..., n] -> uint8 [..., n * 8 / bits]."""
    if bits == 8:
        return packed
    shifts = jnp.arange(0, 8, bits, dtype=jnp.uint8)
    parts = (packed[..., None] >> shifts) & jnp.uint8((1 << bits) - 1)
    return parts.reshape(*packed.shape[:-1], -1)


def _two_levels(fine: jax.Array | np.ndarray, coarse: jax.Array | np.ndarray | None) -> jax.Array:
    """[..., groups] times [..., super-blocks], as float32 [..., groups]."""
    wide = jnp.asarray(fine).astype(jnp.float32)
    if coarse is None:
        return wide
    factor = jnp.asarray(coarse).astype(jnp.float32)
    return wide * jnp.repeat(factor, wide.shape[-1] // factor.shape[-1], axis=-1)
