"""Which weights of low-bit codes the native kernels take, and what they are packed from."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from jaxis.kernels.native_constants import CODE_UNIT, MAX_CODE_GROUP, MAX_LEVELS, SCALE_TYPES
from jaxis.kernels.quantized_matmul.coded import LOW_BITS, CodedWeight
from jaxis.kernels.quantized_matmul.packed_format import PackedFormat
from jaxis.kernels.quantized_matmul.scale_codes import find_codes
from jaxis.kernels.quantized_matmul.weight import INT4_OFFSET, QuantizedWeight

_SUPER_TYPES = ("float16", "float32")


@dataclass(frozen=True)
class CodeSources:
    """The arrays that panels of codes are packed from, in row order; see `Pack` in native/src/matmul.h.

    Attributes:
      data: uint8 or int8 [out, ...], the lower bits of the codes.
      bits: Bits of a code as it is here.
      scale: [out, groups].
      high: uint8 [out, ...], the other bits.
      zero_point: uint8 [out, groups].
      minimum: [out, groups].
      super_scale: [out, super-blocks].
      super_minimum: [out, super-blocks].
    """

    data: np.ndarray
    bits: int
    scale: np.ndarray
    high: np.ndarray | None = None
    zero_point: np.ndarray | None = None
    minimum: np.ndarray | None = None
    super_scale: np.ndarray | None = None
    super_minimum: np.ndarray | None = None


def sources_of_integers(weight: QuantizedWeight, group_size: int) -> tuple[PackedFormat, CodeSources]:
    """Format and sources of a weight with a scale a group; `group_size` divides the weight's, whose scales repeat.

    Scales of int8 that are products of codes and powers of two are stored as such, in half the bytes of bfloat16.
    Those of int4, which jaxis' own quantization does not choose so, would be by chance only.
    """
    repeats = weight.group_size // group_size
    scale, unit = _stored(np.asarray(weight.scale)), None
    if weight.qtype == "int8" and (found := find_codes(scale)) is not None:
        scale, unit = found
    scale = _repeat(scale, repeats)
    zero_point = None if weight.zero_point is None else _repeat(np.asarray(weight.zero_point), repeats)
    bits = 8 if weight.qtype == "int8" else 4
    weight_format = PackedFormat(
        "codes",
        weight.shape[1],
        group_size,
        bits=bits,
        offset=0 if zero_point is not None else 128 if bits == 8 else INT4_OFFSET,
        scale=scale.dtype.name,
        has_zero_points=zero_point is not None,
        super_scale="none" if unit is None else unit.dtype.name,
        super_block=0 if unit is None else weight.shape[1],
        act_qtype=weight.act_qtype,
    )
    return weight_format, CodeSources(np.asarray(weight.qvalue), bits, scale, zero_point=zero_point, super_scale=unit)


def sources_of_codes(weight: CodedWeight) -> tuple[PackedFormat, CodeSources] | None:
    """Format and sources of a weight [out, in]; None if the kernels do not take it."""
    group_size = _kernel_group(weight)
    if group_size is None or not _has_kernel(weight):
        return None
    repeats = weight.group_size // group_size
    weight = _with_codes_for_scales(weight)
    scale, minimum = np.asarray(weight.scale), None if weight.minimum is None else np.asarray(weight.minimum)
    zero_point, super_scale = weight.zero_point, weight.super_scale
    if super_scale is None:
        scale, minimum = _stored(scale), None if minimum is None else _stored(minimum)
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
    zero_points = None if zero_point is None else _repeat(np.asarray(zero_point), repeats)
    weight_format = PackedFormat(
        "codes",
        weight.shape[1],
        group_size,
        bits=max(4, weight.bits),
        offset=0 if levels is not None else weight.offset,
        scale=scale.dtype.name,
        minimum="none" if minimum is None else minimum.dtype.name,
        has_zero_points=zero_points is not None,
        super_scale="none" if super_scale is None else super_scale.dtype.name,
        super_block=0 if super_scale is None else weight.shape[1] // super_scale.shape[-1],
        levels=levels,
        act_qtype=weight.act_qtype,
    )
    return weight_format, CodeSources(
        np.asarray(weight.codes),
        weight.bits,
        _repeat(scale, repeats),
        None if weight.high is None else np.asarray(weight.high),
        zero_points,
        None if minimum is None else _repeat(minimum, repeats),
        None if super_scale is None else np.asarray(super_scale),
        None if weight.super_minimum is None else np.asarray(weight.super_minimum),
    )


def _with_codes_for_scales(weight: CodedWeight) -> CodedWeight:
    """The weight with products of codes and powers of two as such, if its scales (and its minima) all are."""
    scale, minimum = np.asarray(weight.scale), weight.minimum
    is_float = np.issubdtype(scale.dtype, np.floating) or scale.dtype == ml_dtypes.bfloat16
    if weight.super_scale is not None or weight.zero_point is not None or not is_float:
        return weight
    scales = find_codes(scale)
    minima = None if minimum is None else find_codes(np.asarray(minimum), are_minima=True)
    if scales is None or (minimum is not None and minima is None):
        return weight
    codes, units = minima or (None, None)
    return dataclasses.replace(weight, scale=scales[0], super_scale=scales[1], minimum=codes, super_minimum=units)


def kernel_group(in_size: int, group_size: int) -> int | None:
    """The columns to a scale in the kernels, for a weight that has `group_size`; None if they have no such groups."""
    is_narrow = group_size == CODE_UNIT // 2 and in_size % CODE_UNIT == 0
    if is_narrow or (group_size % CODE_UNIT == 0 and group_size <= MAX_CODE_GROUP):
        return group_size
    # Wide groups are cut.
    sizes = range(MAX_CODE_GROUP, 0, -CODE_UNIT)
    return next((size for size in sizes if group_size % size == 0), None)


def _kernel_group(weight: CodedWeight) -> int | None:
    if weight.codes.ndim != 2 or 0 in weight.scale.shape or weight.shape[1] % weight.scale.shape[1] != 0:
        return None
    return kernel_group(weight.shape[1], weight.group_size)


def _has_kernel(weight: CodedWeight) -> bool:
    if not _shapes_fit(weight):
        return False
    has_high = weight.bits > LOW_BITS[weight.bits]
    if has_high != (weight.high is not None) or (weight.minimum is not None and weight.zero_point is not None):
        return False
    if weight.levels is None:
        if not 0 <= weight.offset < 1 << weight.bits or (weight.offset != 0 and weight.zero_point is not None):
            return False
    elif weight.bits > 4 or len(weight.levels) > MAX_LEVELS or weight.zero_point is not None:
        return False
    if weight.super_scale is None:
        return weight.super_minimum is None
    of_one_type = weight.super_minimum is None or weight.super_minimum.dtype == weight.super_scale.dtype
    is_known = weight.super_scale.dtype.name in _SUPER_TYPES and weight.scale.dtype.name in SCALE_TYPES
    has_minima = weight.minimum is not None
    minimum_is_known = not has_minima or np.asarray(weight.minimum).dtype.name in SCALE_TYPES
    super_block = weight.shape[1] // max(1, weight.super_scale.shape[-1])
    is_whole = super_block % max(CODE_UNIT, weight.group_size) == 0 and weight.zero_point is None
    return (
        of_one_type and is_known and minimum_is_known and is_whole and has_minima == (weight.super_minimum is not None)
    )


def _shapes_fit(weight: CodedWeight) -> bool:
    """Whether the arrays are of one matrix: packing relies on it."""
    rows, columns = weight.shape
    of_groups = [weight.scale, weight.minimum, weight.zero_point]
    of_blocks = [weight.super_scale, weight.super_minimum]
    if any(array is not None and array.shape != weight.scale.shape for array in of_groups):
        return False
    if weight.super_scale is not None:
        shape = weight.super_scale.shape
        if len(shape) != 2 or shape[1] == 0 or columns % shape[1] != 0 or shape[0] != rows:
            return False
        if any(array is not None and array.shape != shape for array in of_blocks):
            return False
    high_size = columns * (weight.bits - LOW_BITS[weight.bits]) // 8
    return len(weight.scale) == rows and (weight.high is None or weight.high.shape == (rows, high_size))


def _are_whole(levels: tuple[float, ...]) -> bool:
    """Whether the levels are whole numbers that, with an offset, fit into a byte."""
    return (
        all(level == int(level) for level in levels)
        and max(levels) - min(levels) <= 255
        and max(map(abs, levels)) <= 255
    )


def _stored(numbers: np.ndarray) -> np.ndarray:
    """Scales or minima in a type that the kernels have."""
    return numbers if numbers.dtype.name in SCALE_TYPES else numbers.astype(np.float32)


def _repeat(numbers: np.ndarray, repeats: int) -> np.ndarray:
    return numbers if repeats == 1 else np.repeat(numbers, repeats, axis=-1)
