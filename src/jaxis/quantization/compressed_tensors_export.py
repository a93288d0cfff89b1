"""Quantized weights in the compressed-tensors format: the tensors of a layer, and their description in config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np

from jaxis.kernels.weights import QuantizedWeight, WeightScheme
from jaxis.loading.safetensors_writer import TensorHeader
from jaxis.quantization.formats.word_packing import num_words, pack_nibble_pairs, pack_numbers

_FORMATS = {"int8": "int-quantized", "int4": "pack-quantized"}
VERSION = "0.10.2"
"""Version of the format, in the numbering of the compressed-tensors library."""


def tensor_specs(module: str, shape: tuple[int, int], scheme: WeightScheme) -> dict[str, TensorHeader]:
    """Returns the specs of the tensors that `tensors` returns for a weight [out, in] of this shape."""
    rows, columns = shape
    groups = 1 if scheme.group_size is None else columns // scheme.group_size
    scale_dtype = np.dtype(np.float32 if scheme.group_size is None else ml_dtypes.bfloat16)
    scale = {f"{module}.weight_scale": TensorHeader(scale_dtype, (rows, groups))}
    if scheme.weight_qtype == "int8":
        return {f"{module}.weight": TensorHeader(np.dtype(np.int8), shape)} | scale
    specs = {f"{module}.weight_packed": TensorHeader(np.dtype("<i4"), (rows, num_words(columns, 4)))} | scale
    specs[f"{module}.weight_shape"] = TensorHeader(np.dtype("<i8"), (2,))
    if scheme.weight_calibration_method == "minmax":
        points = TensorHeader(np.dtype("<i4"), (num_words(rows, 4), groups))
        specs[f"{module}.weight_zero_point"] = points
    return specs


def tensors(module: str, weight: QuantizedWeight) -> dict[str, np.ndarray]:
    qvalue, scale = np.asarray(weight.qvalue), {f"{module}.weight_scale": np.asarray(weight.scale)}
    if weight.qtype == "int8":
        return {f"{module}.weight": qvalue} | scale
    found = {f"{module}.weight_packed": pack_nibble_pairs(qvalue)} | scale
    found[f"{module}.weight_shape"] = np.asarray(weight.shape, "<i8")
    if weight.zero_point is not None:
        found[f"{module}.weight_zero_point"] = pack_numbers(np.asarray(weight.zero_point), 4, axis=0)
    return found


def quantization_config(modules: Mapping[str, tuple[str, WeightScheme | None]]) -> dict[str, Any]:
    """Returns config.json's `quantization_config`.

    For other engines, int8 weights with quantized input are W8A8 with one scale per token; int4 weights are W4A16, the
    only packed kind. `modules` has class ("Linear" or "Embedding") and scheme of every module with a weight matrix;
    None if unquantized.
    """
    members: dict[tuple[str, str], list[str]] = {}
    settings: dict[tuple[str, str], dict[str, Any]] = {}
    for name, (kind, scheme) in modules.items():
        if scheme is not None:
            group = _group(kind, scheme)
            key = (kind, repr(group))
            settings[key] = group
            members.setdefault(key, []).append(name)
    # Engines match the class of most linear layers, fused ones included, more reliably than their names.
    most = max((key for key in members if key[0] == "Linear"), key=lambda key: len(members[key]), default=None)
    groups = {
        f"group_{number}": {"targets": ["Linear"] if key == most else members[key]} | settings[key]
        for number, key in enumerate(members)
    }
    formats = {str(group["format"]) for group in groups.values()}
    return {
        "quant_method": "compressed-tensors",
        "format": formats.pop() if len(formats) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": [name for name, (kind, scheme) in modules.items() if most and kind == "Linear" and scheme is None],
        "kv_cache_scheme": None,
        "version": VERSION,
    }


def _group(kind: str, scheme: WeightScheme) -> dict[str, Any]:
    is_grouped = scheme.group_size is not None
    weights = {
        "num_bits": int(scheme.weight_qtype.removeprefix("int")),
        "type": "int",
        "symmetric": scheme.weight_calibration_method != "minmax",
        "strategy": "group" if is_grouped else "channel",
        "group_size": scheme.group_size,
        "dynamic": False,
    }
    activations = None
    # The input of embeddings is token ids, which are not quantized.
    if kind == "Linear" and scheme.weight_qtype == "int8" and scheme.act_qtype == "int8":
        activations = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
    return {
        "format": _FORMATS[scheme.weight_qtype],
        "weights": weights,
        "input_activations": activations,
        "output_activations": None,
    }
