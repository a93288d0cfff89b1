"""Affine quantization with least squared error: the definition, in numpy.

Every operation on float32 is rounded by itself and every sum has the order of the columns, so that native code (in
native/src/quantize_affine.h) gets the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from jaxis.kernels.weights.code_planes import code_planes
from jaxis.kernels.weights.coded_weight import CodedWeight
from jaxis.kernels.weights.scale_codes import MINIMUM_BITS, SCALE_BITS, unit_of

# The first guesses of a scale are a group's range over the largest code plus one of these: below 0 the ends of the
# range are clipped, above it the largest code may stay unused. Multiples of 1/8, which are exact.
_CANDIDATES = (-1.0, -0.625, -0.25, 0.125, 0.5, 0.875, 1.25)
# Relative to a row's largest magnitude, a range below the first counts as 0, and units are not below the second.
_SMALLEST_RANGE = np.float32(2.0**-100)
_SMALLEST_UNIT = np.float32(2.0**-40)
# Rows are divided by a power of two between these, so that squares neither overflow nor vanish.
_SMALLEST_POWER, _LARGEST_POWER = np.float32(2.0**-86), np.float32(2.0**126)


def quantize_affine(weight: np.ndarray, group_size: int, bits: int) -> tuple[np.ndarray, ...]:
    """Quantizes rows of a weight to `scale * code + minimum`, with a scale and a minimum for each group of columns.

    For a few guesses of the scale, each group is rounded to codes, and linear regression finds the scale and minimum
    that fit these best; the best fit is kept. Then minima are rounded to 8 bits, scales are fitted to the rounded
    minima and rounded too, and codes are chosen for the rounded scales and minima.

    The weight is float32 [out, in], finite, without denormals; the group size divides `in`. Returns codes uint8 [out,
    in], scales uint8 [out, groups] and their units float32 [out, 1], minima int8 [out, groups] and their units float32
    [out, 1].
    """
    rows, columns = weight.shape
    power = _power_of(np.abs(weight).max(axis=1, keepdims=True))
    # Columns first: each x[i] has one column of every group.
    x = (weight * (1 / power)).reshape(rows, -1, group_size)
    x = np.ascontiguousarray(np.moveaxis(_flushed(x), -1, 0))
    scale, minimum = _best_fit(x, (1 << bits) - 1)
    minimum, minimum_codes, minimum_unit = _rounded_minima(minimum)
    scale, scale_codes, scale_unit = _rounded_scales(_refitted_scale(x, scale, minimum, bits))
    inverse = _reciprocal(scale)
    codes = np.stack([_code(x_i - minimum, inverse, bits) for x_i in x], axis=-1).astype(np.uint8)
    return codes.reshape(rows, columns), scale_codes, scale_unit * power, minimum_codes, minimum_unit * power


def affine_weight(arrays: tuple[np.ndarray, ...], bits: int, act_qtype: str | None) -> CodedWeight:
    codes, scale, super_scale, minimum, super_minimum = arrays
    planes = code_planes(codes, bits)
    return CodedWeight(
        planes["codes"],
        scale,
        planes.get("high"),
        minimum=minimum,
        super_scale=super_scale,
        super_minimum=super_minimum,
        bits=bits,
        act_qtype=act_qtype,
    )


def _best_fit(x: np.ndarray, largest_code: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the scale and minimum of each group, both [out, groups], not rounded; x is [group_size, out, groups]."""
    low = x.min(axis=0)
    width = x.max(axis=0) - low
    width = np.where(width >= _SMALLEST_RANGE, width, np.float32(0))
    inverse = _reciprocal(width)
    count = np.float32(len(x))
    best_error, best_scale, best_minimum = np.full_like(low, np.inf), low, low
    for candidate in _CANDIDATES:
        steps = np.float32(largest_code + candidate)
        step, inverse_step = width * (1 / steps), inverse * steps
        sum_q, sum_qq, sum_e, sum_qe, sum_ee = (np.zeros_like(low) for _ in range(5))
        for y in _differences(x, low):
            q = np.minimum(np.rint(y * inverse_step), np.float32(largest_code))
            e = y - q * step
            sum_q, sum_qq, sum_e = sum_q + q, sum_qq + q * q, sum_e + e
            sum_qe, sum_ee = sum_qe + q * e, sum_ee + e * e
        # The slope of the errors over the codes, plus the step, is the slope of the values over the codes.
        determinant = count * sum_qq - sum_q * sum_q
        slope = (count * sum_qe - sum_q * sum_e) / np.maximum(determinant, np.float32(1))
        slope = np.where(determinant >= 1, slope, np.float32(0))
        mean = (sum_e - slope * sum_q) * (1 / count)
        error = sum_ee - mean * sum_e - slope * sum_qe
        is_better = error < best_error
        best_error = np.where(is_better, error, best_error)
        best_scale = np.where(is_better, np.maximum(step + slope, np.float32(0)), best_scale)
        best_minimum = np.where(is_better, low + mean, best_minimum)
    return best_scale, best_minimum


def _refitted_scale(x: np.ndarray, scale: np.ndarray, minimum: np.ndarray, bits: int) -> np.ndarray:
    """Returns the scale of least squared error for the codes that scale and minimum give."""
    inverse = _reciprocal(scale)
    sum_qq, sum_qy = np.zeros_like(scale), np.zeros_like(scale)
    for y in _differences(x, minimum):
        q = _code(y, inverse, bits)
        sum_qq, sum_qy = sum_qq + q * q, sum_qy + q * y
    return np.where(sum_qq >= 1, np.maximum(sum_qy / np.maximum(sum_qq, np.float32(1)), np.float32(0)), scale)


def _rounded_minima(minimum: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    unit = np.maximum(unit_of(np.abs(minimum).max(axis=1, keepdims=True), MINIMUM_BITS), _SMALLEST_UNIT)
    codes = np.rint(minimum * (1 / unit))
    return codes * unit, codes.astype(np.int8), unit


def _rounded_scales(scale: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the rounded scales, their codes, and the units of their rows; only a scale of 0 becomes 0."""
    unit = np.maximum(unit_of(scale.max(axis=1, keepdims=True), SCALE_BITS), _SMALLEST_UNIT)
    codes = np.where(scale > 0, np.maximum(np.rint(scale * (1 / unit)), np.float32(1)), np.float32(0))
    return codes * unit, codes.astype(np.uint8), unit


def _code(y: np.ndarray, inverse_scale: np.ndarray, bits: int) -> np.ndarray:
    return np.clip(np.rint(y * inverse_scale), np.float32(0), np.float32((1 << bits) - 1))


def _differences(x: np.ndarray, origin: np.ndarray) -> Iterator[np.ndarray]:
    return (x_i - origin for x_i in x)


def _reciprocal(x: np.ndarray) -> np.ndarray:
    tiny = _SMALLEST_RANGE
    return np.where(x >= tiny, 1 / np.maximum(x, tiny), np.float32(0))


def _power_of(largest: np.ndarray) -> np.ndarray:
    power = (largest.view(np.int32) & np.int32(0x7F800000)).view(np.float32)
    return np.clip(power, _SMALLEST_POWER, _LARGEST_POWER)


def _flushed(x: np.ndarray) -> np.ndarray:
    return np.where(np.abs(x) < np.finfo(np.float32).tiny, np.float32(0), x)
