"""Checks that a checkpoint's low-precision floats have only values that the kernels can compute with."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from jaxis.kernels.weights import BlockScaledWeight

_ELEMENTS_AT_ONCE = 1 << 22
_E4M3_NAN = 0x7F  # without the sign bit
_E2M1_PAIR = 0x77  # two elements without their sign bits
_NOT_FINITE = "whose values or scales are not all finite"
_TOO_SMALL = (
    "with a scale of 2^-127 for elements that are not zero: such numbers are too small for float32 products, and the "
    "file is probably damaged"
)


def check_finite(weight: BlockScaledWeight) -> None:
    """Raises ValueError if a value or a scale is NaN or infinite, or a scale would become 0."""
    scale = np.asarray(weight.scale)
    finite = bool(np.isfinite(scale.astype(np.float32)).all())
    value = np.asarray(weight.value)
    if weight.qtype == "float8_e4m3fn":
        codes = value.view(np.uint8)
        rows = max(1, _ELEMENTS_AT_ONCE // max(1, codes.shape[1]))
        parts = (codes[first : first + rows] for first in range(0, len(codes), rows))
        finite = finite and all(part.size == 0 or (part & _E4M3_NAN).max() != _E4M3_NAN for part in parts)
    if not finite:
        raise ValueError(_NOT_FINITE)
    if scale.dtype == ml_dtypes.float8_e8m0fnu:
        rows, columns = weight.block_shape
        if weight.qtype == "float8_e4m3fn":
            check_exponents(scale, value.view(np.uint8), (rows, columns), _E4M3_NAN)
        else:
            check_exponents(scale, value, (rows, columns // 2), _E2M1_PAIR)


def check_finite_scales(*scales: np.ndarray) -> None:
    if not all(np.isfinite(scale.astype(np.float32)).all() for scale in scales):
        raise ValueError(_NOT_FINITE)


def check_exponents(scale: np.ndarray, codes: np.ndarray, block: tuple[int, int], magnitude: int) -> None:
    """Raises ValueError if other values than 0 have the smallest e8m0 scale, which kernels and XLA may make 0.

    It is a denormal float32. Scales are e8m0 [ceil(out / rows), ceil(in / columns)], codes uint8 [out, in]; `block` is
    (rows, columns) of codes that share a scale, and `magnitude` the bits of a code other than signs.
    """
    smallest = scale.view(np.uint8) == 0
    rows, columns = block
    if not smallest.any():
        return
    if rows == 1 and codes.shape[1] == columns * smallest.shape[1]:
        parts = [codes.reshape(*smallest.shape, columns)[smallest]]
    else:
        starts = zip(rows * np.nonzero(smallest)[0], columns * np.nonzero(smallest)[1], strict=True)
        parts = [codes[row : row + rows, column : column + columns] for row, column in starts]
    if any((part & magnitude).any() for part in parts):
        raise ValueError(_TOO_SMALL)
