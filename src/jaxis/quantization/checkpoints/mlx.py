from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxis.config.quantization import QuantizationConfig
from jaxis.errors import ConfigError
from jaxis.layers.weight_format import WeightFormat
from jaxis.layers.weight_method import WeightedLayer, WeightMethod
from jaxis.loading.safetensors import TensorInfo
from jaxis.quantization.by_tensors import FormatsByTensors
from jaxis.quantization.checkpoint_format import CheckpointFormat, Choice, Stored, as_chosen
from jaxis.quantization.checkpoints.compressed_tensors import RULES_KEY
from jaxis.quantization.formats.mlx import AFFINE_BITS, FLOAT_MODES, MlxAffineFormat, MlxFloatFormat
from jaxis.quantization.rules import RuleQuantizationConfig, weight_scheme
from jaxis.quantization_rules import rules_from

KEY = "quantization"
"""Key of config.json; newer files repeat the object as `quantization_config`."""
_WORD_BITS = 32


def is_mlx(config: Mapping[str, Any]) -> bool:
    """Returns whether an object of config.json is MLX's."""
    return "quant_method" not in config and "bits" in config and "group_size" in config


def mlx_config(config: Mapping[str, Any], tensors: Mapping[str, TensorInfo] | None) -> FormatsByTensors:
    """Reads the quantization of a checkpoint that MLX quantized; without tensors, config.json alone decides.

    Raises ConfigError if the mode or the number of bits is unknown; or, for a module, its tensors do not belong
    together.
    """
    if tensors is None:
        return FormatsByTensors(lambda module, shape: _format_of_config(config.get(module, config), shape))
    _format_of_config(config, (1, 0))
    return FormatsByTensors(lambda module, shape: _format_of(module, shape, tensors))


@dataclass(frozen=True)
class QuantizedByRules(FormatsByTensors):
    """A checkpoint that jaxis wrote in this format: the rules decide the types of its weights in memory."""

    rules: RuleQuantizationConfig

    def get_quant_method(self, layer: WeightedLayer, prefix: str) -> WeightMethod | None:
        method, scheme = super().get_quant_method(layer, prefix), weight_scheme(self.rules.find(prefix))
        if method is None:
            return None
        formats = {
            slot: dataclasses.replace(each, scheme=scheme) if isinstance(each, MlxAffineFormat) else each
            for slot, each in method.formats.items()
        }
        return dataclasses.replace(method, formats=formats)


def _format_of_config(settings: Any, shape: tuple[int, ...]) -> WeightFormat | None:
    """Returns the format by these settings of a weight of this shape, which must consist of whole groups."""
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
    """Returns the module's format by its tensors. Raises ValueError if they are of no known format."""
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
    """Returns (bits of an element, elements of a group); 0 if the shapes do not say."""
    words, groups = (tensor.shape[-1] if tensor.shape else 0 for tensor in (weight, scales))
    bits = words * _WORD_BITS // columns if words * _WORD_BITS % columns == 0 else 0
    return bits, columns // groups if groups and columns % groups == 0 else 0


def _read(stored: Stored, choice: Choice) -> QuantizationConfig:
    """Makes the config of a checkpoint, which jaxis may have written by rules; a choice overrides activations."""
    config = mlx_config(stored.settings, stored.tensors)
    if stored.rules is not None:
        rules = rules_from(stored.rules, f"{RULES_KEY} in config.json")
        if choice is not None:
            rules = tuple(dataclasses.replace(rule, act_qtype=None) for rule in rules)
        config = QuantizedByRules(config.format_of, RuleQuantizationConfig(rules, must_match=False))
    return as_chosen(config, stored.method, choice)


FORMATS = (CheckpointFormat(("mlx",), _read),)
