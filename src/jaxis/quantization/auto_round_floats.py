"""Checkpoints of low-precision floats by AutoRound: fp8, MXFP4, MXFP8 and NVFP4.

They have the tensors of compressed-tensors and fp8 checkpoints, which tell how each module is stored. config.json
says only the size of fp8's blocks. Source: AutoRound's export_to_fp8 and qlinear_fp.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np

from jaxis.errors import ConfigError
from jaxis.layers.weight_format import WeightFormat
from jaxis.loading.safetensors import TensorInfo
from jaxis.quantization.by_tensors import FormatsByTensors
from jaxis.quantization.formats.fp8_blocks import Fp8BlocksFormat
from jaxis.quantization.formats.fp8_tensor import Fp8TensorFormat
from jaxis.quantization.formats.microscaling import MicroscalingFormat
from jaxis.quantization.formats.nvfp4 import NVFP4_PACKED
from jaxis.quantization.module_patterns import WHERE
from jaxis.quantization.tensor_names import TensorNames

DATA_TYPES = ("nv_fp", "mx_fp", "fp")
"""Prefixes of the data types that are read here."""
_E4M3, _BYTE = np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(np.uint8)


@dataclass(frozen=True)
class FloatsByTensors(FormatsByTensors):
    """The format of each module, found by its tensors; scales of activations are not used. A QuantizationConfig."""

    names: TensorNames = field(default_factory=TensorNames)

    def tensor_name(self, name: str) -> str | None:
        self.names.say_if_unused(name)
        return self.names.translated(name)


@dataclass(frozen=True)
class FloatModules:
    """The format of each module of a checkpoint, by its tensors' headers, if there are any to look at.

    `block` is (rows, columns) of the blocks of fp8; None if config.json has none.
    """

    block: tuple[int, int] | None
    tensors: Mapping[str, TensorInfo] | None

    def format_of(self, name: str, _shape: tuple[int, ...]) -> WeightFormat | None:
        tensors = self.tensors or {}
        if f"{name}.weight_packed" in tensors:
            if f"{name}.weight_global_scale" in tensors:
                return NVFP4_PACKED
            return MicroscalingFormat(4, "weight_packed")
        weight = tensors.get(f"{name}.weight")
        if weight is None or weight.dtype != _E4M3:
            return None
        if f"{name}.weight_scale_inv" in tensors:
            if self.block is None:
                raise ConfigError(f"{WHERE} has no weight_block_size, and {name} is stored in blocks")
            return Fp8BlocksFormat(self.block)
        scale = tensors.get(f"{name}.weight_scale")
        if scale is not None and scale.dtype == _BYTE:
            return MicroscalingFormat(8, "weight")
        return Fp8TensorFormat()


def floats_config(config: Mapping[str, Any], tensors: Mapping[str, TensorInfo] | None) -> FloatsByTensors:
    """Reads a `quantization_config` of AutoRound whose `data_type` is one of floats."""
    return FloatsByTensors(FloatModules(_block_of(config), tensors).format_of)


def _block_of(config: Mapping[str, Any]) -> tuple[int, int] | None:
    for key in ("weight_block_size", "group_size"):
        block = config.get(key)
        if isinstance(block, list) and len(block) == 2 and all(type(size) is int and size > 0 for size in block):
            return block[0], block[1]
    return None
