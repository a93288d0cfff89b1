"""Quantization in native code, called with ctypes: bit-identical to the definition in plain JAX."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import ml_dtypes
import numpy as np

from jaxis.kernels import native
from jaxis.kernels.host_threads import for_each_part
from jaxis.kernels.native_constants import CALIBRATIONS, FLOAT_TYPES, QUANTIZE_STATUS
from jaxis.kernels.weights.scheme import WeightScheme

_ELEMENTS_PER_TASK = 1 << 19
_OUTPUTS = ("qvalue", "scale", "zero_point", "scale_unit", "minimum", "minimum_unit")
"""Outputs of `jaxis_quantize`, in the order of its arguments."""


def usable(weight: np.ndarray) -> bool:
    return native.library() is not None and weight.dtype.name in FLOAT_TYPES


def quantize(weight: np.ndarray, scheme: WeightScheme) -> tuple[np.ndarray, ...] | None:
    weight = np.ascontiguousarray(weight)
    rows, columns = weight.shape
    is_row_wise, group = scheme.group_size is None, scheme.group_size or columns
    outputs = _outputs(rows, columns, scheme)

    def quantize_rows(first: int, last: int) -> bool:
        parts = {
            name: ctypes.c_void_p(array[first:].ctypes.data) for name, array in (outputs | {"weight": weight}).items()
        }
        return _function("jaxis_quantize")(
            *_how(weight, scheme),
            parts["weight"],
            ctypes.c_int64(last - first),
            ctypes.c_int64(columns),
            ctypes.c_int64(group),
            ctypes.c_bool(is_row_wise and "scale_unit" not in outputs),
            *(parts.get(name) for name in _OUTPUTS),
        )

    are_finite = for_each_part(quantize_rows, rows, max(1, _ELEMENTS_PER_TASK // columns))
    if not all(are_finite):
        return None
    if scheme.weight_calibration_method == "affine":
        names = ("qvalue", "scale", "scale_unit", "minimum", "minimum_unit")
        return tuple(outputs[name] for name in names)
    scale = outputs["scale"]
    if "scale_unit" in outputs:
        scale = (scale * outputs["scale_unit"]).astype(ml_dtypes.bfloat16)
    zero_point = outputs.get("zero_point")
    return (outputs["qvalue"], scale) if zero_point is None else (outputs["qvalue"], scale, zero_point)


def _outputs(rows: int, columns: int, scheme: WeightScheme) -> dict[str, np.ndarray]:
    method, is_int8 = scheme.weight_calibration_method, scheme.weight_qtype == "int8"
    groups = (rows, columns // (scheme.group_size or columns))
    if method == "affine":
        return {
            "qvalue": np.empty((rows, columns), np.uint8),
            "scale": np.empty(groups, np.uint8),
            "scale_unit": np.empty((rows, 1), np.float32),
            "minimum": np.empty(groups, np.int8),
            "minimum_unit": np.empty((rows, 1), np.float32),
        }
    if is_int8:
        qvalue = np.empty((rows, columns), np.int8)
        if scheme.group_size is None:
            return {"qvalue": qvalue, "scale": np.empty(groups, np.float32)}
        unit = np.empty((rows, 1), np.float32)
        return {"qvalue": qvalue, "scale": np.empty(groups, np.uint8), "scale_unit": unit}
    scale_dtype = np.float32 if scheme.group_size is None else ml_dtypes.bfloat16
    found = {"qvalue": np.empty((rows, columns // 2), np.uint8), "scale": np.empty(groups, scale_dtype)}
    return found | ({"zero_point": np.empty(groups, np.uint8)} if method == "minmax" else {})


def quantize_panels(weight: np.ndarray, scheme: WeightScheme, packed: np.ndarray, panel_rows: int) -> bool:
    """Quantizes float32, float16 or bfloat16 [out, in] straight into packed panels; True if all values are finite.

    `packed`, uint8 [panels, panel's bytes], is filled in place.
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
    function = getattr(native.library(), name)

    def call(*arguments: object) -> bool:
        status = function(*arguments)
        if status == QUANTIZE_STATUS["out_of_memory"]:
            raise MemoryError("no memory to quantize a weight in")
        if status not in (QUANTIZE_STATUS["ok"], QUANTIZE_STATUS["not_finite"]):
            raise ValueError("there is no native code to quantize such a weight")
        return status == QUANTIZE_STATUS["ok"]

    return call
