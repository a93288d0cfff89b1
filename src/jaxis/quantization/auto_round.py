"""Checkpoints quantized by AutoRound, which stores weights in the formats of other tools.

Source: AutoRound's `convert_hf_model` and its exporters.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np

from jaxis.errors import ConfigError
from jaxis.layers.weight_format import WeightFormat
from jaxis.loading.safetensors import TensorInfo
from jaxis.quantization.awq import awq_config
from jaxis.quantization.by_tensors import FormatsByTensors
from jaxis.quantization.formats.fp8_blocks import Fp8BlocksFormat
from jaxis.quantization.formats.fp8_tensor import Fp8TensorFormat
from jaxis.quantization.formats.microscaling import MicroscalingFormat
from jaxis.quantization.formats.nvfp4 import NvFp4Format
from jaxis.quantization.gptq import gptq_config
from jaxis.quantization.module_patterns import WHERE, check_keys
from jaxis.quantization.tensor_names import TensorNames
from jaxis.quantization.tool_keys import check_tool_keys

# Checkpoints of low-precision floats by AutoRound: fp8, MXFP4, MXFP8 and NVFP4.
#
# They have the tensors of compressed-tensors and fp8 checkpoints, which tell how each module is stored; config.json
# says only the size of fp8's blocks. Source: AutoRound's export_to_fp8 and qlinear_fp.


DATA_TYPES = ("nv_fp", "mx_fp", "fp")
"""How the names of the data types begin that are read here."""
_E4M3, _BYTE = np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(np.uint8)


@dataclass(frozen=True)
class FloatsByTensors(FormatsByTensors):
    """The format of each module, found by its tensors; scales of activations are not used. A QuantizationConfig."""

    names: TensorNames = field(default_factory=TensorNames)

    def tensor_name(self, name: str) -> str | None:
        """See `NamesTensors`."""
        self.names.say_if_unused(name)
        return self.names.translated(name)


@dataclass(frozen=True)
class FloatModules:
    """How each module of a checkpoint is stored.

    Attributes:
      block: (rows, columns) of the blocks of fp8; None if config.json has none.
      tensors: Headers of the checkpoint's tensors; None if there are none to look at.
    """

    block: tuple[int, int] | None
    tensors: Mapping[str, TensorInfo] | None

    def format_of(self, name: str, _shape: tuple[int, ...]) -> WeightFormat | None:
        """See `FormatOf`."""
        tensors = self.tensors or {}
        if f"{name}.weight_packed" in tensors:
            if f"{name}.weight_global_scale" in tensors:
                return NvFp4Format("weight_packed", "weight_global_scale", divides=True)
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
    """A `quantization_config` of AutoRound whose `data_type` is one of floats."""
    return FloatsByTensors(FloatModules(_block_of(config), tensors).format_of)


def _block_of(config: Mapping[str, Any]) -> tuple[int, int] | None:
    """(rows, columns) of the blocks, under either key."""
    for key in ("weight_block_size", "group_size"):
        block = config.get(key)
        if isinstance(block, list) and len(block) == 2 and all(type(size) is int and size > 0 for size in block):
            return block[0], block[1]
    return None


_GPTQ, _GPTQ_V2, _AWQ = "gptq", "gptq_v2", "awq"
_PACKING_FORMATS = {
    **dict.fromkeys(("auto_round:auto_gptq", "auto_round:gptq"), _GPTQ),
    **dict.fromkeys(("auto_round", "auto_round:gptqmodel"), _GPTQ_V2),
    **dict.fromkeys(("auto_round:auto_awq", "auto_round:awq"), _AWQ),
}
# Names of kernels, in the oldest checkpoints; how those write zero points is known only if they are symmetric.
_OLD_FORMATS = ("auto_round:exllamav2", "auto_round:tritonv2", "autoround:exllamav2")
_DEFAULT = "auto_round:auto_gptq"
_SETTINGS = ("bits", "group_size", "sym")
_KEYS = (
    *_SETTINGS,
    *("quant_method", "packing_format", "data_type", "extra_config", "block_name_to_quantize", "to_quant_block_names"),
    *("modules_to_not_convert", "backend", "lm_head", "rotation_config", "rotation_configs"),
)
# Activations are not quantized, which is more accurate; or to int8, if asked for.
_KEYS_OF_FLOATS = ("act_bits", "weight_block_size")
_WIDEST = 8


def auto_round_config(config: Mapping[str, Any], tensors: Mapping[str, TensorInfo] | None) -> FormatsByTensors:
    """A `quantization_config` whose `quant_method` is "auto-round".

    Raises:
      ConfigError: It asks for something that is not implemented.
    """
    data_type = config.get("data_type") or "int"
    is_float = isinstance(data_type, str) and data_type.startswith(DATA_TYPES)
    check_tool_keys(config, (*_KEYS, *_KEYS_OF_FLOATS) if is_float else _KEYS, WHERE)
    for key in ("rotation_config", "rotation_configs"):
        check_keys({key: config.get(key)}, {key: (None, {}, [])}, WHERE)
    if is_float:
        return floats_config(config, tensors)
    # The oldest checkpoints have it under `backend`.
    names = [config.get("packing_format"), config.get("backend"), _DEFAULT]
    name = next(each for each in names if each not in (None, "auto"))
    if name in _OLD_FORMATS and config.get("sym", True) is True:
        name = _DEFAULT
    if data_type != "int" or not isinstance(name, str) or name not in _PACKING_FORMATS:
        raise ConfigError(
            f"{WHERE}: packing_format={name!r} with data_type={data_type!r} and "
            f"sym={config.get('sym', True)!r} is not supported: use a checkpoint that AutoRound exported as auto_gptq, "
            "auto_awq or llm_compressor"
        )
    kind = _PACKING_FORMATS[name]
    if kind == _AWQ:
        return awq_config({"bits": config.get("bits"), "group_size": config.get("group_size")}, tensors)
    as_gptq = {key: config[key] for key in (*_SETTINGS, "lm_head") if key in config}
    return gptq_config({**as_gptq, "checkpoint_format": kind, "dynamic": _rules(config)}, tensors)


def _rules(config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """`extra_config`, whose keys are names or regular expressions to be found in names, as GPTQ's `dynamic`.

    A name goes before all expressions, and 16 bits mean that a module is not quantized.
    """
    extra = config.get("extra_config") or {}
    where = f"{WHERE}: extra_config"
    if not isinstance(extra, Mapping):
        raise ConfigError(f"{where}={extra!r} must be an object")
    exact: dict[str, dict[str, Any]] = {}
    searched: dict[str, dict[str, Any]] = {}
    for key, changes in extra.items():
        if not isinstance(changes, Mapping):
            raise ConfigError(f"{where}: {key} is {changes!r}, expected an object")
        check_tool_keys(changes, _KEYS, f"{where}: {key}")
        if changes.get("data_type", "int") not in ("int", None, "float"):
            raise ConfigError(f"{where}: {key}: data_type={changes['data_type']!r} is not supported; supported: 'int'")
        settings = {name: value for name, value in changes.items() if name in _SETTINGS and value is not None}
        bits = settings.get("bits")
        mark = "-:" if isinstance(bits, int) and bits > _WIDEST else "+:"
        exact[f"{mark}{re.escape(key)}$"] = settings
        searched[f"{mark}.*(?:{key})"] = settings
    return exact | searched
