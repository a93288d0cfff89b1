"""Integers of 2, 3, 4 or 8 bits in groups of columns, as weights in memory: those of GPTQ and AWQ checkpoints."""

from __future__ import annotations

import math
from collections.abc import Mapping

import ml_dtypes
import numpy as np

from jaxis.kernels.weights import CodedWeight, QuantizedWeight
from jaxis.kernels.weights.code_planes import LOW_BITS, code_planes
from jaxis.quantization.formats.word_packing import unpack_numbers

BITS = (2, 3, 4, 8)
SCALE_DTYPES = tuple(np.dtype(dtype) for dtype in (np.float16, ml_dtypes.bfloat16, np.float32))
_MIN_GROUP_SIZE = 8


def group_sizes(columns: int, group_size: int | None) -> list[int]:
    """Returns the columns in each group of `group_size` (None: all of them); the last may be smaller."""
    if group_size is None:
        return [columns]
    return [min(group_size, columns - first) for first in range(0, columns, group_size)]


def check_columns(columns: int) -> None:
    """Raises ValueError unless a row consists of whole bytes, whatever the bits of a number."""
    if columns % 8:
        raise ValueError(f"has {columns} features, which is not a multiple of 8")


def in_equal_groups(
    sizes: list[int], scale: np.ndarray, zero_point: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray | None]:
    """Splits groups of columns of these sizes until all are equally large, by repeating what each of them has.

    A size is 0 for a group that is not used. Scales and zero points, if any, are [out, groups], and then [out, equal
    groups]. Raises ValueError if equal groups would be too small.
    """
    size = math.gcd(*sizes)
    if size < _MIN_GROUP_SIZE:
        raise ValueError(f"whose groups have from {min(sizes)} to {max(sizes)} columns, which is not supported")
    repeats = np.asarray(sizes) // size
    if np.all(repeats == 1):
        return scale, zero_point
    return np.repeat(scale, repeats, axis=1), None if zero_point is None else np.repeat(zero_point, repeats, axis=1)


def planes_of(words: np.ndarray, bits: int, columns: int, order: np.ndarray | None = None) -> dict[str, np.ndarray]:
    """Converts words of numbers, int32 [out, num_words(columns, bits)], to `codes` and `high` of a CodedWeight.

    The columns are a multiple of 8; `order` is their new order, None that of the words.
    """
    if order is None and bits == LOW_BITS[bits]:
        return {"codes": np.ascontiguousarray(words).view(np.uint8)[:, : columns * bits // 8]}
    numbers = unpack_numbers(words, bits, columns)
    return code_planes(numbers if order is None else numbers[:, order], bits)


def weight_of(
    planes: Mapping[str, np.ndarray], bits: int, scale: np.ndarray, zero_point: np.ndarray | None
) -> QuantizedWeight | CodedWeight:
    """Returns the weight `scale * (number - zero_point)` of numbers as `planes_of` returns them.

    Scales are [out, groups], every group with as many columns; zero points uint8 [out, groups], None means 2 ** (bits -
    1). Raises ValueError if a scale is not finite.
    """
    if not np.isfinite(scale.astype(np.float32)).all():
        raise ValueError("whose scales are not all finite")
    # Products with one group a row multiply by its scale at the end, in float32.
    scale = scale.astype(np.float32) if scale.shape[1] == 1 else scale
    if bits == 4:
        return QuantizedWeight(planes["codes"], scale, zero_point)
    if bits == 8 and zero_point is None:
        return QuantizedWeight((planes["codes"] ^ np.uint8(0x80)).view(np.int8), scale)
    offset = 1 << (bits - 1) if zero_point is None else 0
    return CodedWeight(planes["codes"], scale, planes.get("high"), zero_point, bits=bits, offset=offset)
