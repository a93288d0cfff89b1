"""Quantized weights in MLX's affine format: the tensors of a layer, and their description in config.json.

It has what compressed-tensors lacks: a minimum to a group ("biases"), and 5 and 6 bits.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from jaxis.errors import ConfigError
from jaxis.kernels.weights import CodedWeight, QuantizedWeight, WeightScheme
from jaxis.kernels.weights.code_planes import plane_numbers
from jaxis.layers.weight_format import WeightFormat
from jaxis.layers.weight_method import WeightedLayer, WeightMethod
from jaxis.loading.safetensors import TensorInfo
from jaxis.loading.safetensors_writer import TensorHeader
from jaxis.quantization.by_tensors import FormatsByTensors
from jaxis.quantization.formats.mlx import AFFINE_BITS, FLOAT_MODES, MlxAffineFormat, MlxFloatFormat
from jaxis.quantization.formats.word_packing import num_words, pack_numbers
from jaxis.quantization.rules import RuleQuantizationConfig, weight_scheme

KEY = "quantization"
"""Key of config.json; newer files repeat the object as `quantization_config`."""
_WORD_BITS = 32


def is_mlx(config: Mapping[str, Any]) -> bool:
    """Whether an object of config.json is MLX's."""
    return "quant_method" not in config and "bits" in config and "group_size" in config


def mlx_config(config: Mapping[str, Any], tensors: Mapping[str, TensorInfo] | None) -> FormatsByTensors:
    """How to load a checkpoint that MLX quantized.

    Args:
      config: The object in config.json.
      tensors: Headers of the checkpoint's tensors; None means that config.json must tell.

    Raises:
      ConfigError: The mode or the number of bits is unknown; or, for a module, its tensors do not belong together.
    """
    if tensors is None:
        return FormatsByTensors(lambda module, shape: _format_of_config(config.get(module, config), shape))
    _format_of_config(config, (1, 0))
    return FormatsByTensors(lambda module, shape: _format_of(module, shape, tensors))


@dataclass(frozen=True)
class QuantizedByRules(FormatsByTensors):
    """A checkpoint that jaxis wrote in this format: what its weights are in memory follows from the rules.

    Attributes:
      rules: Those that it was quantized with.
    """

    rules: RuleQuantizationConfig

    def get_quant_method(self, layer: WeightedLayer, prefix: str) -> WeightMethod | None:
        """See `QuantizationConfig`."""
        method, scheme = super().get_quant_method(layer, prefix), weight_scheme(self.rules.find(prefix))
        if method is None:
            return None
        formats = {
            slot: dataclasses.replace(each, scheme=scheme) if isinstance(each, MlxAffineFormat) else each
            for slot, each in method.formats.items()
        }
        return dataclasses.replace(method, formats=formats)


def _format_of_config(settings: Any, shape: tuple[int, ...]) -> WeightFormat | None:
    """The format that these settings give a weight of this shape, which must consist of whole groups."""
    if not isinstance(settings, Mapping):
        return None
    bits, group_size, mode = settings.get("bits"), settings.get("group_size"), settings.get("mode", "affine")
    if mode in FLOAT_MODES:
        return MlxFloatFormat(mode) if shape[1] % FLOAT_MODES[mode][1] == 0 else None
    if mode != "affine":
        known = ", ".join(("affine", *FLOAT_MODES))
        raise ConfigError(f"{KEY} in config.json: mode={mode!r} is not supported; known: {known}")
    if bits not in AFFINE_BITS or type(group_size) is not int or group_size < 1:
        raise ConfigError(f"{KEY} in config.json: bits={bits!r} with group_size={group_size!r} is not supported")
    return MlxAffineFormat(bits, group_size) if shape[1] % group_size == 0 else None


def _format_of(module: str, shape: tuple[int, ...], tensors: Mapping[str, TensorInfo]) -> WeightFormat | None:
    """Raises ValueError if the module's tensors are of no known format."""
    weight, scales = tensors.get(f"{module}.weight"), tensors.get(f"{module}.scales")
    if scales is None or weight is None:
        return None
    if f"{module}.global_scale" in tensors:
        raise ValueError("has a global_scale, which is not supported: use a checkpoint quantized without it")
    bits, group_size = _sizes(shape[1], weight, scales)
    if f"{module}.biases" in tensors:
        if bits in AFFINE_BITS and group_size:
            return MlxAffineFormat(bits, group_size)
    elif scales.dtype == np.uint8:
        for mode, (bits_of_mode, group_size_of_mode, _) in FLOAT_MODES.items():
            if (bits, group_size) == (bits_of_mode, group_size_of_mode):
                return MlxFloatFormat(mode)
    raise ValueError(
        f"has {shape[1]} features, which weight {list(weight.shape)} with {scales.dtype} scales {list(scales.shape)} "
        "do not match in any of MLX's formats"
    )


def _sizes(columns: int, weight: TensorInfo, scales: TensorInfo) -> tuple[int, int]:
    """(Bits of an element, elements of a group); 0 if the shapes do not say."""
    words, groups = (tensor.shape[-1] if tensor.shape else 0 for tensor in (weight, scales))
    bits = words * _WORD_BITS // columns if words * _WORD_BITS % columns == 0 else 0
    return bits, columns // groups if groups and columns % groups == 0 else 0


# Quantized weights in MLX's affine format: the tensors of a layer, and their description in config.json.
#
# It has what compressed-tensors lacks: a minimum to a group ("biases"), and 5 and 6 bits.


GROUP_SIZES = (32, 64, 128)
_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
_EXPERT = "re:"


def tensor_specs(module: str, shape: tuple[int, int], scheme: WeightScheme) -> dict[str, TensorHeader]:
    """The specs of the tensors that `tensors` returns for a weight [out, in] of this shape."""
    rows, columns = shape
    group_size = _settings(module, scheme)["group_size"]
    groups = TensorHeader(_BFLOAT16, (rows, columns // group_size))
    words = TensorHeader(np.dtype("<u4"), (rows, num_words(columns, _bits(scheme))))
    return {f"{module}.weight": words, f"{module}.scales": groups, f"{module}.biases": groups}


def tensors(module: str, weight: QuantizedWeight | CodedWeight) -> dict[str, np.ndarray]:
    """The tensors that represent a weight of numpy arrays, of one of the kinds that `quantization_config` takes.

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
    """config.json's `quantization`: the settings of most modules, and by name those of the others.

    Args:
      modules: As for compressed-tensors: name -> class and scheme of every module with a weight matrix; the name of
        experts is a regular expression.

    Raises:
      ConfigError: A scheme has no counterpart in the format.
    """
    settings = {name: _settings(name, scheme) for name, (_, scheme) in modules.items() if scheme is not None}
    (usual, _), *_ = Counter(map(repr, settings.values())).most_common(1)
    default = next(each for each in settings.values() if repr(each) == usual)
    others = {name: each for name, each in settings.items() if each != default}
    return default | {"mode": "affine"} | {path: each for name, each in others.items() for path in _paths(name)}


def _settings(module: str, scheme: WeightScheme) -> dict[str, int]:
    """Raises ConfigError if the format has no such weights."""
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
    """MLX's names of a module; it calls the stacks of experts `switch_mlp`."""
    if not name.startswith(_EXPERT):
        return [name]
    parent = name.removeprefix(_EXPERT).replace("\\", "").removesuffix(".d+.").rpartition(".")[0]
    return [f"{parent}.switch_mlp.{projection}" for projection in ("gate_proj", "up_proj", "down_proj")]
