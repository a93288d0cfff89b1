"""Values of parameters as JSON beside arrays, and back."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jaxis.kernels.weights import (
    BlockScaledWeight,
    CodedWeight,
    PackedWeight,
    QuantizedWeight,
    ReorderedWeight,
    TokenQuantizedWeight,
)
from jaxis.kernels.weights.packed_format import PackedFormat
from jaxis.kernels.weights.packed_weight import device_array

_CLASSES: dict[str, type[Any]] = {
    each.__name__: each
    for each in (
        *(PackedWeight, PackedFormat, QuantizedWeight, CodedWeight),
        *(BlockScaledWeight, ReorderedWeight, TokenQuantizedWeight),
    )
}


def describe(value: Any, add: Callable[[np.ndarray], str]) -> Any:
    """Returns a value as JSON; `add` keeps an array of it and returns its name."""
    if isinstance(value, jax.Array | np.ndarray):
        array = np.asarray(value)
        return {"array": add(array), "dtype": array.dtype.name, "shape": list(array.shape)}
    if dataclasses.is_dataclass(value):
        fields = {each.name: describe(getattr(value, each.name), add) for each in dataclasses.fields(value)}
        return {"class": _CLASSES[type(value).__name__].__name__, **fields}
    return list(value) if isinstance(value, tuple) else value


def restore(described: Any, take: Callable[[str, np.dtype, tuple[int, ...]], np.ndarray]) -> Any:
    """Returns the value that `describe` described; `take` returns an array by its name, type and shape."""
    if isinstance(described, list):
        return tuple(described)
    if not isinstance(described, dict):
        return described
    if "array" in described:
        return take(described["array"], np.dtype(described["dtype"]), tuple(described["shape"]))
    fields = {name: restore(each, take) for name, each in described.items() if name != "class"}
    value = _CLASSES[described["class"]](**fields)
    return (
        dataclasses.replace(value, data=device_array(np.asarray(value.data)))
        if isinstance(value, PackedWeight)
        else value
    )
