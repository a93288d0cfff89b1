"""Quantized weights in MLX's affine format: the tensors of a layer, and their description in config.json.

It has what compressed-tensors lacks: a minimum to a group ("biases"), and 5 and 6 bits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np

from jaxis.errors import ConfigError
from jaxis.kernels.weights import CodedWeight, QuantizedWeight, WeightScheme
from jaxis.kernels.weights.code_planes import plane_numbers
from jaxis.loading.safetensors_writer import TensorHeader
from jaxis.quantization.formats.word_packing import num_words, pack_numbers

GROUP_SIZES = (32, 64, 128)
_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
_EXPERT = "re:"


def tensor_specs(module: str, shape: tuple[int, int], scheme: WeightScheme) -> dict[str, TensorHeader]:
    """Returns the specs of the tensors that `tensors` returns for a weight [out, in] of this shape."""
    rows, columns = shape
    group_size = _settings(module, scheme)["group_size"]
    groups = TensorHeader(_BFLOAT16, (rows, columns // group_size))
    words = TensorHeader(np.dtype("<u4"), (rows, num_words(columns, _bits(scheme))))
    return {f"{module}.weight": words, f"{module}.scales": groups, f"{module}.biases": groups}


def tensors(module: str, weight: QuantizedWeight | CodedWeight) -> dict[str, np.ndarray]:
    """Returns the tensors that represent a weight of numpy arrays, of a kind that `quantization_config` takes.

    Scales and minima are exact in bfloat16, also that of symmetric integers, whose smallest value it is.
    """
    if isinstance(weight, CodedWeight):
        bits, high = weight.bits, None if weight.high is None else np.asarray(weight.high)
        numbers = plane_numbers(np.asarray(weight.codes), high, bits)
        scales = np.asarray(weight.scale) * np.asarray(weight.super_scale)
        biases = np.asarray(weight.minimum) * np.asarray(weight.super_minimum)
    else:
        qvalue, scales = np.asarray(weight.qvalue), np.asarray(weight.scale).astype(np.float32)
        bits = 8 if weight.qtype == "int8" else 4
        numbers = qvalue.view(np.uint8) ^ np.uint8(0x80) if bits == 8 else plane_numbers(qvalue, None, 4)
        biases = scales * np.float32(-(1 << (bits - 1)))
    return {
        f"{module}.weight": pack_numbers(numbers, bits).view("<u4"),
        f"{module}.scales": scales.astype(_BFLOAT16),
        f"{module}.biases": biases.astype(_BFLOAT16),
    }


def quantization_config(modules: Mapping[str, tuple[str, WeightScheme | None]]) -> dict[str, Any]:
    """Returns config.json's `quantization`: the settings of most modules, and by name those of the others.

    `modules` has class and scheme of every module with a weight matrix; the name of experts is a regular expression.
    Raises ConfigError if a scheme has no counterpart in the format.
    """
    settings = {name: _settings(name, scheme) for name, (_, scheme) in modules.items() if scheme is not None}
    (usual, _), *_ = Counter(map(repr, settings.values())).most_common(1)
    default = next(each for each in settings.values() if repr(each) == usual)
    others = {name: each for name, each in settings.items() if each != default}
    return default | {"mode": "affine"} | {path: each for name, each in others.items() for path in _paths(name)}


def _settings(module: str, scheme: WeightScheme) -> dict[str, int]:
    """Returns the settings of a scheme. Raises ConfigError if the format has no such weights."""
    if scheme.group_size not in GROUP_SIZES:
        raise ConfigError(
            f"{module.removeprefix(_EXPERT)} has tile_size={scheme.group_size}, which a checkpoint with affine modules "
            f"cannot store: its rule needs one of {', '.join(map(str, GROUP_SIZES))}"
        )
    if scheme.weight_calibration_method == "minmax":
        raise ConfigError(
            f"{module.removeprefix(_EXPERT)} has weight_calibration_method='minmax', which a checkpoint with affine "
            "modules cannot store: use 'affine' there too"
        )
    return {"group_size": scheme.group_size, "bits": _bits(scheme)}


def _bits(scheme: WeightScheme) -> int:
    return int(scheme.weight_qtype.removeprefix("int"))


def _paths(name: str) -> list[str]:
    """Returns MLX's names of a module; it calls the stacks of experts `switch_mlp`."""
    if not name.startswith(_EXPERT):
        return [name]
    parent = name.removeprefix(_EXPERT).replace("\\", "").removesuffix(".d+.").rpartition(".")[0]
    return [f"{parent}.switch_mlp.{projection}" for projection in ("gate_proj", "up_proj", "down_proj")]
