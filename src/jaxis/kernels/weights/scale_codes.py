"""Scales as 8-bit codes times a power of two of their row: half the bytes of bfloat16, which holds each product."""

from __future__ import annotations

from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

Numbers = TypeVar("Numbers", np.ndarray, jax.Array)

SCALE_BITS = 8
MINIMUM_BITS = 7
"""Bits of the largest code of a row: scales are 0 to 255, minima -127 to 127."""
_SMALLEST = np.float32(2.0**-126)


def unit_of(largest: Numbers, bits: int) -> Numbers:
    """Returns the smallest power of two with which codes of `bits` bits reach the largest magnitude of a row.

    It is a normal number, so that its products with codes are exact. `largest` is float32, 0 or more, not denormal.
    """
    library: Any = jnp if isinstance(largest, jax.Array) else np
    exponent = largest.view(np.int32) & np.int32(0x7F800000)
    unit = library.maximum(exponent - np.int32((bits - 1) << 23), np.int32(1 << 23)).view(np.float32)
    return library.where(largest > unit * np.float32((1 << bits) - 1), unit * np.float32(2), unit)


def find_codes(numbers: np.ndarray, *, are_minima: bool = False) -> tuple[np.ndarray, np.ndarray] | None:
    """Returns codes and units whose products are exactly these numbers [out, groups], or None if a row has none.

    Codes are uint8 (for minima, which may be negative, int8) [out, groups], units float32 [out, 1].
    """
    wide = numbers.astype(np.float32)
    magnitudes = np.abs(wide)
    largest = magnitudes.max(axis=1, keepdims=True, initial=0)
    if not np.isfinite(largest).all() or (magnitudes < _SMALLEST)[magnitudes != 0].any():
        return None
    unit = unit_of(largest, MINIMUM_BITS if are_minima else SCALE_BITS)
    multiples = wide / unit
    codes = multiples.astype(np.int8 if are_minima else np.uint8)
    return (codes, unit) if (codes == multiples).all() else None
