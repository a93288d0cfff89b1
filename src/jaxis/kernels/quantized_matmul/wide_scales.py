"""Packed weights whose 8-bit scales become floats again, so that they can stand beside others in a stack.

Weights are packed with 8-bit scales if their scales happen to be such numbers; a single expert may be an exception.
"""

from __future__ import annotations

import dataclasses

import ml_dtypes
import numpy as np

from jaxis.kernels.native_constants import CODE_UNIT, PANEL_ROWS
from jaxis.kernels.quantized_matmul.packed import PackedWeight
from jaxis.kernels.quantized_matmul.packed_format import PackedFormat

_BYTES = {"bfloat16": np.dtype(ml_dtypes.bfloat16), "float16": np.dtype(np.float16), "float32": np.dtype(np.float32)}


def can_widen(weight_format: PackedFormat, wide: PackedFormat) -> bool:
    """Whether weights of a format become weights of another if their scales become floats."""
    has_codes = weight_format.scale == "uint8" and weight_format.super_block == weight_format.in_size
    types = {wide.scale, wide.minimum} - {"none"}
    return (
        has_codes
        and types <= _BYTES.keys()
        and wide
        == dataclasses.replace(weight_format, scale=wide.scale, minimum=wide.minimum, super_scale="none", super_block=0)
        and (wide.minimum == "none") == (weight_format.minimum == "none")
    )


def widen(weight: PackedWeight, wide: PackedFormat) -> PackedWeight:
    """A weight with the same elements in a format that `can_widen` accepts."""
    narrow, data = weight.format, np.asarray(weight.data)
    span = max(narrow.group_size, CODE_UNIT)
    numbers = span // narrow.group_size * PANEL_ROWS
    kinds: list[tuple[np.dtype, np.dtype]] = [(np.dtype(np.uint8), _BYTES[wide.scale])]
    if narrow.minimum != "none":
        kinds.append((np.dtype(np.int8), _BYTES[wide.minimum]))
    head = len(kinds) * PANEL_ROWS * 4
    units = data[..., :head].copy().view(np.float32).reshape(*data.shape[:-1], len(kinds), 1, 1, PANEL_ROWS)
    spans = data[..., head:].reshape(*data.shape[:-1], narrow.in_size // span, -1)
    parts = []
    for index, (code, target) in enumerate(kinds):
        codes = spans[..., index * numbers : (index + 1) * numbers].view(code)
        products = (codes.reshape(*codes.shape[:-1], -1, PANEL_ROWS) * units[..., index, :, :, :]).astype(target)
        parts.append(products.reshape(*codes.shape).view(np.uint8))
    parts.append(spans[..., len(kinds) * numbers :])
    return dataclasses.replace(weight, data=np.concatenate(parts, axis=-1).reshape(*data.shape[:-1], -1), format=wide)
