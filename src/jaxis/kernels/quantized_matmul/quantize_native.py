"""`quantize` in native code, by ctypes: the numbers of the definition in plain JAX, bit for bit."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import ml_dtypes
import numpy as np

from jaxis.kernels import native
from jaxis.kernels.host_threads import for_each_part
from jaxis.kernels.native_constants import CALIBRATIONS, FLOAT_TYPES, QUANTIZE_STATUS

_ELEMENTS_PER_TASK = 1 << 19


def usable(weight: np.ndarray) -> bool:
    """Whether there is native code for weights of this type."""
    return native.library() is not None and weight.dtype.name in FLOAT_TYPES


def quantize(
    weight: np.ndarray, qtype: str, tile_size: int | None, calibration_method: str
) -> tuple[np.ndarray, ...] | None:
    """The arrays of `quantize.quantize`'s result, whose arguments these are; None if one is not finite."""
    weight = np.ascontiguousarray(weight)
    rows, columns = weight.shape
    group = tile_size or columns
    qvalue = np.empty(weight.shape, np.int8) if qtype == "int8" else np.empty((rows, columns // 2), np.uint8)
    scale = np.empty((rows, columns // group), np.float32 if tile_size is None else ml_dtypes.bfloat16)
    arrays: tuple[np.ndarray, ...] = (qvalue, scale)
    if calibration_method == "minmax":
        arrays = (*arrays, np.empty(scale.shape, np.uint8))

    def quantize_rows(first: int, last: int) -> bool:
        parts = [ctypes.c_void_p(array[first:].ctypes.data) for array in (weight, *arrays)]
        return _function("jaxis_quantize")(
            *_how(weight, qtype, calibration_method),
            parts[0],
            ctypes.c_int64(last - first),
            ctypes.c_int64(columns),
            ctypes.c_int64(group),
            ctypes.c_bool(tile_size is None),
            *parts[1:],
            *[None] * (4 - len(parts)),
        )

    are_finite = for_each_part(quantize_rows, rows, max(1, _ELEMENTS_PER_TASK // columns))
    return arrays if all(are_finite) else None


def quantize_panels(
    weight: np.ndarray, qtype: str, group_size: int, calibration_method: str, packed: np.ndarray, panel_rows: int
) -> bool:
    """Quantizes straight into packed panels; see `packed.quantize_and_pack`.

    Args:
      weight: As for `quantize`.
      qtype: As for `quantize`.
      group_size: Columns that share a scale; 0 is all of them.
      calibration_method: As for `quantize`.
      packed: uint8 [panels, panel's bytes], filled.
      panel_rows: Rows of a panel.

    Returns:
      Whether all weights and scales are finite.
    """
    weight = np.ascontiguousarray(weight)
    rows, columns = weight.shape

    def quantize_part(first: int, last: int) -> bool:
        return _function("jaxis_quantize_panels")(
            *_how(weight, qtype, calibration_method),
            ctypes.c_void_p(weight.ctypes.data),
            ctypes.c_int64(rows),
            ctypes.c_int64(columns),
            ctypes.c_int64(group_size),
            ctypes.c_void_p(packed.ctypes.data),
            ctypes.c_int64(first),
            ctypes.c_int64(last),
        )

    return all(for_each_part(quantize_part, len(packed), max(1, _ELEMENTS_PER_TASK // (panel_rows * columns))))


def _how(weight: np.ndarray, qtype: str, calibration_method: str) -> tuple[int, int]:
    return FLOAT_TYPES[weight.dtype.name], CALIBRATIONS[f"{qtype}_{calibration_method}"]


def _function(name: str) -> Callable[..., bool]:
    """A function of the library that returns a status, as one that returns whether all numbers are finite."""
    function = getattr(native.library(), name)

    def call(*arguments: object) -> bool:
        status = function(*arguments)
        if status == QUANTIZE_STATUS["out_of_memory"]:
            raise MemoryError("no memory to quantize a weight in")
        if status not in (QUANTIZE_STATUS["ok"], QUANTIZE_STATUS["not_finite"]):
            raise ValueError("there is no native code to quantize such a weight")
        return status == QUANTIZE_STATUS["ok"]

    return call
