"""Checkpoints quantized by HQQ: a module is quantized if the file has its `W_q`; the header of `W_q` says how.

Source: transformers' HqqConfig and hqq's HQQLinear.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from jaxis.errors import ConfigError
from jaxis.layers.weight_format import WeightFormat
from jaxis.loading.safetensors import TensorInfo
from jaxis.quantization.by_tensors import FormatsByTensors
from jaxis.quantization.checkpoint_format import CheckpointFormat, as_stored
from jaxis.quantization.formats.hqq import METADATA, HqqFormat
from jaxis.quantization.module_patterns import WHERE, check_keys

_KEYS: dict[str, tuple[Any, ...] | None] = dict.fromkeys(("quant_method", "quant_config", "skip_modules"))


@dataclass(frozen=True)
class HqqModules:
    """The format of each module of a checkpoint, by the headers of its tensors, if there are any to look at."""

    tensors: Mapping[str, TensorInfo] | None

    def format_of(self, name: str, shape: tuple[int, ...]) -> WeightFormat | None:
        """Finds the format of a module. Raises ConfigError if the format is not supported."""
        if self.tensors is None or (numbers := self.tensors.get(f"{name}.W_q")) is None:
            return None
        scale = self.tensors.get(f"{name}.scale")
        if scale is None:
            raise ConfigError(
                f"{WHERE}: {name} has no tensor 'scale': scales that are quantized too are not read; quantize with "
                "quant_scale=False"
            )
        if len(scale.shape) != 2 or scale.shape[1] != 1:
            raise ConfigError(
                f"{WHERE}: {name}.scale has shape {list(scale.shape)}: groups of rows (axis=0) are not read; quantize "
                "with axis=1"
            )
        metadata = ((each, self.tensors.get(f"{name}.{each}")) for each in METADATA)
        found = tuple((each, info.shape) for each, info in metadata if info is not None)
        weight_format = HqqFormat.of(numbers.shape, numbers.dtype, scale.shape[0], found)
        if weight_format is None or scale.shape[0] * weight_format.group_size != math.prod(shape):
            raise ConfigError(
                f"{WHERE}: {name}.W_q has shape {list(numbers.shape)} and type {numbers.dtype}, which is no packing of "
                f"{scale.shape[0]} groups: quantize with view_as_float=False and 8, 4, 3, 2 or 1 bits for weights of "
                f"shape {list(shape)}"
            )
        return weight_format


def hqq_config(config: Mapping[str, Any], tensors: Mapping[str, TensorInfo] | None) -> FormatsByTensors:
    """Reads a `quantization_config` whose `quant_method` is "hqq".

    Raises ConfigError if the object asks for something that is not implemented.
    """
    check_keys(config, _KEYS, WHERE)
    return FormatsByTensors(HqqModules(tensors).format_of)


def is_quantized(tensors: Iterable[str]) -> bool:
    """Returns whether the weights are quantized already: config.json may also ask an engine to quantize them."""
    return any(name.endswith(".W_q") for name in tensors)


FORMATS = (CheckpointFormat(("hqq",), as_stored(hqq_config), is_quantized),)
