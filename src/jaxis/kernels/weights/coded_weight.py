"""CodedWeight: a matrix of low-bit codes, jaxis' own affine ones and those of formats other than int8, int4 and fp8.

One type serves the block types of GGUF (K-quants, IQ4, Q4_1, ...), NF4, FP4, NVFP4, MLX, HQQ and others.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Self

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.typing import DTypeLike

from jaxis.kernels.grouped_matmul.stored import StoredStack
from jaxis.kernels.native_constants import CODE_UNIT, MAX_LEVELS, SCALE_TYPES
from jaxis.kernels.weights.code_planes import LOW_BITS
from jaxis.kernels.weights.packed_format import PackedFormat, PanelSources, kernel_group, kernel_scales, repeat
from jaxis.kernels.weights.packed_weight import PackedWeight, pack_panels
from jaxis.kernels.weights.quantized_activations import round_activations
from jaxis.kernels.weights.scale_codes import find_codes
from jaxis.kernels.weights.weight import Allocate, Weight

_SUPER_TYPES = ("float16", "float32")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class CodedWeight(Weight):
    """A weight [..., out, in] whose elements are `scale * (value - zero_point) + minimum`.

    The value is `levels[code]` if there are levels, else `code - offset`. Every row has as many groups of neighbouring
    columns as `scale` has entries for it. Scales and minima may have two levels: the scale of a group is multiplied by
    the super-scale of the super-block of neighbouring groups around it. All of this is computed in float32.

    Attributes:
      codes: uint8 [..., out, in * LOW_BITS[bits] / 8]: the low bits of the codes, densely, earlier columns in lower
        bits.
      scale: [..., out, groups], of any type.
      high: uint8 [..., out, in * (bits - LOW_BITS[bits]) / 8]: the other bits of the codes in the same order, if any.
      zero_point, minimum: [..., out, groups], of any type; None means 0.
      super_scale, super_minimum: float32 or float16 [..., out, super-blocks], multiply `scale` and `minimum`; None
        means 1.
      bits: Bits of a code: 2, 3, 4, 5, 6 or 8.
      offset: Subtracted from a code.
      levels: Value of each code, instead of the code itself.
      act_qtype: "int8" quantizes the input of the weight's products dynamically; with "integers", it is already of
        whole numbers from -127 to 127; None does not.
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
        *leading, size = self.codes.shape
        return (*leading, size * 8 // LOW_BITS[self.bits])

    @property
    def group_size(self) -> int:
        return self.shape[-1] // self.scale.shape[-1]

    @property
    def storage(self) -> str:
        return f"int{self.bits}" if self.levels is None else f"{self.bits}-bit"

    @property
    def quantizes_input(self) -> bool:
        return self.act_qtype is not None

    @property
    def column_major_arrays(self) -> frozenset[str]:
        return frozenset({"scale", "zero_point", "minimum", "super_scale", "super_minimum"})

    def matmul(self, x: jax.Array, preferred_element_type: DTypeLike | None = None) -> jax.Array:
        x = self.round_input(x)
        dense = self.dequantize(x.dtype)
        return jnp.einsum("...i,oi->...o", x, dense, preferred_element_type=preferred_element_type)

    def dequantize(self, dtype: DTypeLike = jnp.float32) -> jax.Array:
        values = self._values().reshape(*self.scale.shape, -1)
        scale = _two_levels(self.scale, self.super_scale)
        if self.zero_point is not None:
            values = values - jnp.asarray(self.zero_point).astype(jnp.float32)[..., None]
        values = values * scale[..., None]
        if self.minimum is not None:
            values = values + _two_levels(self.minimum, self.super_minimum)[..., None]
        return values.reshape(self.shape).astype(dtype)

    def round_input(self, x: jax.Array) -> jax.Array:
        return round_activations(x) if self.act_qtype == "int8" else x

    def with_quantized_input(self, act_qtype: str) -> Self:
        return dataclasses.replace(self, act_qtype=act_qtype)

    def kernel_stack(self) -> StoredStack | None:
        """Returns the stack for codes of 4 bits that are numbers: jaxis' own int4, and MLX's and GGUF's Q4_1."""
        are_numbers = self.bits == 4 and self.levels is None and not self.offset and self.zero_point is None
        supers = [array for array in (self.super_scale, self.super_minimum) if array is not None]
        of_rows = all(array.shape[-1] == 1 for array in supers)
        as_many = not supers or len(supers) == 1 + (self.minimum is not None)
        if not (are_numbers and of_rows and as_many) or self.group_size % 2:
            return None
        return StoredStack(
            self.codes,
            self.scale,
            minimum=self.minimum,
            super_scale=self.super_scale,
            super_minimum=self.super_minimum,
            kind="uint4",
            block_shape=(1, self.group_size),
        )

    def pack(self, dtype: DTypeLike = jnp.float32, allocate: Allocate | None = None) -> PackedWeight | None:
        sources = self._panel_sources()
        return None if sources is None else pack_panels(len(self.codes), *sources, allocate)

    def _panel_sources(self) -> tuple[PackedFormat, PanelSources] | None:
        """Returns the format and sources of the panels of a weight [out, in]; None if the kernels do not take it."""
        group_size = self._kernel_group()
        if group_size is None or not self._has_kernel():
            return None
        repeats = self.group_size // group_size
        weight = self._with_codes_for_scales()
        scale, minimum = np.asarray(weight.scale), None if weight.minimum is None else np.asarray(weight.minimum)
        zero_point, super_scale = weight.zero_point, weight.super_scale
        if super_scale is None:
            scale, minimum = kernel_scales(scale), None if minimum is None else kernel_scales(minimum)
        if zero_point is not None and np.asarray(zero_point).dtype != np.uint8:
            # scale * (code - zero_point) as scale * code - scale * zero_point.
            minimum, zero_point = -scale.astype(np.float32) * np.asarray(zero_point).astype(np.float32), None
        levels = weight.levels
        if levels is not None:
            levels = (*map(float, levels), *[0.0] * (MAX_LEVELS - len(levels)))
            doubled = tuple(2 * level for level in levels)
            # Levels that are halves become whole numbers, whose products with activations of int8 are exact.
            if super_scale is not None and not _are_whole(levels) and _are_whole(doubled):
                levels, super_scale = doubled, np.asarray(super_scale).astype(np.float32) * np.float32(0.5)
        if weight.act_qtype is not None and levels is not None and not _are_whole(levels):
            return None
        zero_points = None if zero_point is None else repeat(np.asarray(zero_point), repeats)
        weight_format = PackedFormat(
            "codes",
            weight.shape[1],
            group_size,
            bits=2 if weight.bits == 2 and levels is None else max(4, weight.bits),
            offset=0 if levels is not None else weight.offset,
            scale=scale.dtype.name,
            minimum="none" if minimum is None else minimum.dtype.name,
            has_zero_points=zero_points is not None,
            super_scale="none" if super_scale is None else super_scale.dtype.name,
            super_block=0 if super_scale is None else weight.shape[1] // super_scale.shape[-1],
            levels=levels,
            act_qtype=weight.act_qtype,
        )
        return weight_format, PanelSources(
            np.asarray(weight.codes),
            repeat(scale, repeats),
            weight.bits,
            None if weight.high is None else np.asarray(weight.high),
            zero_points,
            None if minimum is None else repeat(minimum, repeats),
            None if super_scale is None else np.asarray(super_scale),
            None if weight.super_minimum is None else np.asarray(weight.super_minimum),
        )

    def _with_codes_for_scales(self) -> CodedWeight:
        """Returns the weight with scales (and minima) as codes times powers of two, if they all are such products."""
        scale, minimum = np.asarray(self.scale), self.minimum
        is_float = np.issubdtype(scale.dtype, np.floating) or scale.dtype == ml_dtypes.bfloat16
        if self.super_scale is not None or self.zero_point is not None or not is_float:
            return self
        scales = find_codes(scale)
        minima = None if minimum is None else find_codes(np.asarray(minimum), are_minima=True)
        if scales is None or (minimum is not None and minima is None):
            return self
        codes, units = minima or (None, None)
        return dataclasses.replace(self, scale=scales[0], super_scale=scales[1], minimum=codes, super_minimum=units)

    def _kernel_group(self) -> int | None:
        if self.codes.ndim != 2 or 0 in self.scale.shape or self.shape[1] % self.scale.shape[1] != 0:
            return None
        return kernel_group(self.shape[1], self.group_size)

    def _has_kernel(self) -> bool:
        if not self._shapes_fit():
            return False
        has_high = self.bits > LOW_BITS[self.bits]
        if has_high != (self.high is not None) or (self.minimum is not None and self.zero_point is not None):
            return False
        if self.levels is None:
            if not 0 <= self.offset < 1 << self.bits or (self.offset != 0 and self.zero_point is not None):
                return False
        elif self.bits > 4 or len(self.levels) > MAX_LEVELS or self.zero_point is not None:
            return False
        if self.super_scale is None:
            return self.super_minimum is None
        of_one_type = self.super_minimum is None or self.super_minimum.dtype == self.super_scale.dtype
        is_known = self.super_scale.dtype.name in _SUPER_TYPES and self.scale.dtype.name in SCALE_TYPES
        has_minima = self.minimum is not None
        minimum_is_known = not has_minima or np.asarray(self.minimum).dtype.name in SCALE_TYPES
        super_block = self.shape[1] // max(1, self.super_scale.shape[-1])
        is_whole = super_block % max(CODE_UNIT, self.group_size) == 0 and self.zero_point is None
        has_both = has_minima == (self.super_minimum is not None)
        return of_one_type and is_known and minimum_is_known and is_whole and has_both

    def _shapes_fit(self) -> bool:
        """Returns whether the shapes are those of one matrix; packing relies on it."""
        rows, columns = self.shape
        of_groups = [self.scale, self.minimum, self.zero_point]
        of_blocks = [self.super_scale, self.super_minimum]
        if any(array is not None and array.shape != self.scale.shape for array in of_groups):
            return False
        if self.super_scale is not None:
            shape = self.super_scale.shape
            if len(shape) != 2 or shape[1] == 0 or columns % shape[1] != 0 or shape[0] != rows:
                return False
            if any(array is not None and array.shape != shape for array in of_blocks):
                return False
        high_size = columns * (self.bits - LOW_BITS[self.bits]) // 8
        return len(self.scale) == rows and (self.high is None or self.high.shape == (rows, high_size))

    def _values(self) -> jax.Array:
        """Returns the values of the codes, float32 [..., out, in]."""
        low_bits = LOW_BITS[self.bits]
        codes = _unpack(jnp.asarray(self.codes), low_bits)
        if self.high is not None:
            codes = codes | (_unpack(jnp.asarray(self.high), self.bits - low_bits) << low_bits)
        if self.levels is None:
            return codes.astype(jnp.float32) - self.offset
        return jnp.take(jnp.asarray(self.levels, jnp.float32), codes.astype(jnp.int32), axis=0)


def _unpack(packed: jax.Array, bits: int) -> jax.Array:
    if bits == 8:
        return packed
    shifts = jnp.arange(0, 8, bits, dtype=jnp.uint8)
    parts = (packed[..., None] >> shifts) & jnp.uint8((1 << bits) - 1)
    return parts.reshape(*packed.shape[:-1], -1)


def _two_levels(fine: jax.Array | np.ndarray, coarse: jax.Array | np.ndarray | None) -> jax.Array:
    wide = jnp.asarray(fine).astype(jnp.float32)
    if coarse is None:
        return wide
    factor = jnp.asarray(coarse).astype(jnp.float32)
    return wide * jnp.repeat(factor, wide.shape[-1] // factor.shape[-1], axis=-1)


def _are_whole(levels: tuple[float, ...]) -> bool:
    """Returns whether the levels are whole numbers that, with an offset, fit into a byte."""
    return (
        all(level == int(level) for level in levels)
        and max(levels) - min(levels) <= 255
        and max(map(abs, levels)) <= 255
    )
