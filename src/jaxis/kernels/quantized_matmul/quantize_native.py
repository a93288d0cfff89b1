"""`quantize` in native code, called with ctypes: bit-identical to the definition in plain JAX."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import ml_dtypes
import numpy as np

from jaxis.kernels import native
from jaxis.kernels.host_threads import for_each_part
from jaxis.kernels.native_constants import CALIBRATIONS, FLOAT_TYPES, QUANTIZE_STATUS
from jaxis.kernels.quantized_matmul.weight import WeightScheme

_ELEMENTS_PER_TASK = 1 << 19


def usable(weight: np.ndarray) -> bool:
    """Whether native code supports weights of this type."""
    return native.library() is not None and weight.dtype.name in FLOAT_TYPES


def quantize(weight: np.ndarray, scheme: WeightScheme) -> tuple[np.ndarray, ...] | None:
    """The arrays of `quantize.quantize`'s result, for the same arguments; None if a value is not finite."""
    weight = np.ascontiguousarray(weight)
    rows, columns = weight.shape
    is_row_wise, group = scheme.group_size is None, scheme.group_size or columns
    is_int8 = scheme.weight_qtype == "int8"
    qvalue = np.empty(weight.shape, np.int8) if is_int8 else np.empty((rows, columns // 2), np.uint8)
    scale = np.empty((rows, columns // group), np.float32 if is_row_wise else ml_dtypes.bfloat16)
    arrays: tuple[np.ndarray, ...] = (qvalue, scale)
    if scheme.weight_calibration_method == "minmax":
        arrays = (*arrays, np.empty(scale.shape, np.uint8))

    def quantize_rows(first: int, last: int) -> bool:
        parts = [ctypes.c_void_p(array[first:].ctypes.data) for array in (weight, *arrays)]
        return _function("jaxis_quantize")(
            *_how(weight, scheme),
            parts[0],
            ctypes.c_int64(last - first),
            ctypes.c_int64(columns),
            ctypes.c_int64(group),
            ctypes.c_bool(is_row_wise),
            *parts[1:],
            *[None] * (4 - len(parts)),
        )

    are_finite = for_each_part(quantize_rows, rows, max(1, _ELEMENTS_PER_TASK // columns))
    return arrays if all(are_finite) else None


def quantize_panels(weight: np.ndarray, scheme: WeightScheme, packed: np.ndarray, panel_rows: int) -> bool:
    """Quantizes straight into packed panels; see `packed.quantize_and_pack`.

    Args:
      weight: See `quantize`.
      scheme: See `quantize`.
      packed: uint8 [panels, panel's bytes]; filled in place.
      panel_rows: Rows of a panel.

    Returns:
      Whether all weights and scales are finite.
    """
    weight = np.ascontiguousarray(weight)
    rows, columns = weight.shape

    def quantize_part(first: int, last: int) -> bool:
        return _function("jaxis_quantize_panels")(
            *_how(weight, scheme),
            ctypes.c_void_p(weight.ctypes.data),
            ctypes.c_int64(rows),
            ctypes.c_int64(columns),
            ctypes.c_int64(scheme.group_size or 0),
            ctypes.c_void_p(packed.ctypes.data),
            ctypes.c_int64(first),
            ctypes.c_int64(last),
        )

    return all(for_each_part(quantize_part, len(packed), max(1, _ELEMENTS_PER_TASK // (panel_rows * columns))))


def _how(weight: np.ndarray, scheme: WeightScheme) -> tuple[int, int]:
    how = f"{scheme.weight_qtype}_{scheme.weight_calibration_method}"
    return FLOAT_TYPES[weight.dtype.name], CALIBRATIONS[how]


def _function(name: str) -> Callable[..., bool]:
    """Wraps a library function that returns a status into one that returns whether all values are finite."""
    function = getattr(native.library(), name)

    def call(*arguments: object) -> bool:
        status = function(*arguments)
        if status == QUANTIZE_STATUS["out_of_memory"]:
            raise MemoryError("no memory to quantize a weight in")
        if status not in (QUANTIZE_STATUS["ok"], QUANTIZE_STATUS["not_finite"]):
            raise ValueError("there is no native code to quantize such a weight")
        return status == QUANTIZE_STATUS["ok"]

    return call
