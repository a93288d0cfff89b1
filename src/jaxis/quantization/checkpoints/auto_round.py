"""Checkpoints quantized by AutoRound, which stores weights in the formats of other tools.

Source: AutoRound's `convert_hf_model` and its exporters.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from jaxis.errors import ConfigError
from jaxis.loading.safetensors import TensorInfo
from jaxis.quantization.auto_round_floats import DATA_TYPES, floats_config
from jaxis.quantization.by_tensors import FormatsByTensors
from jaxis.quantization.checkpoint_format import CheckpointFormat, as_stored
from jaxis.quantization.checkpoints.awq import awq_config
from jaxis.quantization.checkpoints.gptq import gptq_config
from jaxis.quantization.module_patterns import WHERE, check_keys
from jaxis.quantization.tool_keys import check_tool_keys

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
    """Reads a `quantization_config` whose `quant_method` is "auto-round".

    Raises ConfigError if the object asks for something that is not implemented.
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
    """Returns `extra_config`. Its keys are names, or regular expressions to be found in names, as GPTQ's `dynamic`.

    A name goes before all expressions. A module with 16 bits is not quantized.
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


FORMATS = (CheckpointFormat(("auto-round", "intel/auto-round"), as_stored(auto_round_config), is_always_stored=True),)
