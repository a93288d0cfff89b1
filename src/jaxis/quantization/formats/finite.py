"""Checks that the values of fp8 and MXFP4 checkpoints are finite."""

from __future__ import annotations

import numpy as np

from jaxis.kernels.weights import BlockScaledWeight

_ELEMENTS_AT_ONCE = 1 << 22
_E4M3_NAN = 0x7F  # without the sign bit


def check_finite(weight: BlockScaledWeight) -> None:
    """Raises ValueError if a value or a scale is NaN or infinite; e2m1 has neither, and e4m3 no infinity."""
    finite = bool(np.isfinite(np.asarray(weight.scale).astype(np.float32)).all())
    if weight.qtype == "float8_e4m3fn":
        codes = np.asarray(weight.value).view(np.uint8)
        rows = max(1, _ELEMENTS_AT_ONCE // max(1, codes.shape[1]))
        parts = (codes[first : first + rows] for first in range(0, len(codes), rows))
        finite = finite and all(part.size == 0 or (part & _E4M3_NAN).max() != _E4M3_NAN for part in parts)
    if not finite:
        raise ValueError("whose values or scales are not all finite")
