"""Counts a loaded model's parameters, and names how most of them are stored."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

from flax import nnx

from jaxis.kernels.quantized_matmul.coded import CodedWeight
from jaxis.kernels.quantized_matmul.packed import PackedWeight
from jaxis.kernels.quantized_matmul.packed_format import PackedFormat
from jaxis.kernels.quantized_matmul.reordered import ReorderedWeight
from jaxis.layers.module import named_parameters


def model_size(*models: nnx.Module) -> tuple[int, str]:
    """(number of parameters, how most of them are stored) of a loaded model; shared parameters count once.

    Of a model in several pipeline stages, `models` are theirs.

    The second is a type such as "bfloat16" or "int8", or "4-bit" for codes that are no integers; "" for a model without
    parameters.
    """
    by_name: dict[str, nnx.Param] = {}
    for model in models:
        names = {id(param): name for name, param in reversed(list(named_parameters(model)))}
        by_name |= {name: param for name, param in named_parameters(model) if names[id(param)] == name}
    weights = [param.get_value() for param in by_name.values()]
    elements: Counter[str] = Counter()
    for weight in weights:
        elements[_storage(weight)] += math.prod(_shape(weight))
    return elements.total(), next((name for name, _ in elements.most_common(1)), "")


def _shape(weight: Any) -> tuple[int, ...]:
    if isinstance(weight, ReorderedWeight):
        return _shape(weight.weight)
    if isinstance(weight, PackedWeight):  # its own shape is that of one matrix of a stack
        return (*weight.data.shape[:-2], *weight.shape)
    return weight.shape


def _storage(weight: Any) -> str:
    if isinstance(weight, ReorderedWeight):
        return _storage(weight.weight)
    codes = getattr(weight, "format", weight)
    if isinstance(codes, CodedWeight) or (isinstance(codes, PackedFormat) and codes.bits):
        return f"int{codes.bits}" if codes.levels is None else f"{codes.bits}-bit"
    return weight.qtype if hasattr(weight, "qtype") else str(weight.dtype)
