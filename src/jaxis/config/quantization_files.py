"""Reads config.json together with the files in which some quantizers describe the weights.

Current checkpoints have that description in config.json, as `quantization_config`. Some have it in a file beside it,
alone or as well; a multimodal checkpoint may have it in its `text_config`. Readers find it as `quantization_config`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jaxis.config.missing_config import explain_missing_config
from jaxis.config.mistral_params import PARAMS, is_mistral_format, read_mistral_params
from jaxis.errors import CheckpointError, ConfigError
from jaxis.host.json_object import read_json_object

CONFIG = "config.json"
MAX_CONFIG_BYTES = 16 << 20  # the longest lists of modules that are not quantized have 2 MB
_KEY = "quantization_config"
_OLDER_KEY = "compression_config"  # of the first compressed-tensors checkpoints
# A tool's name, in letters only -> the method of the checkpoints that it writes.
_METHODS = {
    "modelopt": "modelopt",
    "llmcompressor": "compressed-tensors",
    "compressedtensors": "compressed-tensors",
    "autogptq": "gptq",
    "gptqmodel": "gptq",
    "autoawq": "awq",
}
# Keys that say how to read the weights, compared where both files have them.
_COMPARED = ("quant_algo", "bits", "group_size", "desc_act", "sym", "zero_point")


def config_path(folder: str | os.PathLike[str]) -> Path:
    """Returns the file that `read_config` reads: the folder's config.json, else Mistral's params.json."""
    return Path(folder) / (PARAMS if is_mistral_format(Path(folder)) else CONFIG)


def read_config(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Reads the folder's config.json, or Mistral's params.json, with the quantization in other files or `text_config`.

    Raises:
      CheckpointError: There is no config.json, or a file is not a JSON object.
      ConfigError: Two descriptions of the quantization contradict each other, or a cause of `read_mistral_params`.
    """
    path = config_path(folder)
    if path.name == PARAMS:
        return read_mistral_params(Path(folder))
    if not path.exists():
        raise CheckpointError(explain_missing_config(Path(folder)))
    return with_quantization(read_json_object(path, max_bytes=MAX_CONFIG_BYTES), Path(folder))


def with_quantization(values: Mapping[str, Any], folder: Path | None = None) -> dict[str, Any]:
    """Returns a parsed config.json with `quantization_config`, if anything in the folder describes one.

    `folder` is config.json's; None if there is nothing beside it. Raises CheckpointError if a file beside it is not a
    JSON object, and ConfigError if two descriptions contradict each other.
    """
    found = dict(values)
    config_path = Path(CONFIG) if folder is None else folder / CONFIG
    text_config = values.get("text_config")
    if isinstance(text_config, dict) and isinstance(inner := text_config.get(_KEY), dict):
        found["text_config"] = {key: value for key, value in text_config.items() if key != _KEY}
        found = _with(found, inner, f"text_config of {config_path}", config_path)
    if isinstance(older := found.get(_OLDER_KEY), dict):
        del found[_OLDER_KEY]
        found = _with(found, {"quant_method": "compressed-tensors", **older}, _OLDER_KEY, config_path)
    found = _with_method_of_producer(found)
    if folder is None:
        return found
    for name, read in QUANTIZATION_FILES.items():
        if (path := folder / name).exists() and (described := read(read_json_object(path), path)) is not None:
            found = _with(found, described, str(path), config_path)
    return found


def _with(values: dict[str, Any], described: dict[str, Any], where: str, config_path: Path) -> dict[str, Any]:
    """Returns the config with this description; config.json's own goes first, if it has one."""
    own = values.get(_KEY)
    if not isinstance(own, dict):
        return values | {_KEY: described}
    for key in _COMPARED:
        if key in own and key in described and own[key] != described[key]:
            raise ConfigError(
                f"{config_path} says {key}={own[key]!r} of the quantization, and {where} {key}={described[key]!r}: "
                "remove the wrong one"
            )
    if own.get("quant_method") is None and "quant_method" in described:
        own = {**own, "quant_method": described["quant_method"]}
    return values | {_KEY: own}


def _with_method_of_producer(values: dict[str, Any]) -> dict[str, Any]:
    """Returns the config with the method of the tool that it names as its producer, if it names no method."""
    own = values.get(_KEY)
    if not isinstance(own, dict) or own.get("quant_method") is not None:
        return values
    producer = own.get("producer")
    name = producer.get("name") if isinstance(producer, dict) else producer
    method = _METHODS.get(re.sub(r"[^a-z]", "", name.lower())) if isinstance(name, str) else None
    return values if method is None else values | {_KEY: {**own, "quant_method": method}}


def _modelopt(values: dict[str, Any], path: Path) -> dict[str, Any] | None:
    """Reads NVIDIA ModelOpt's file; None if it describes no quantized weights."""
    producer, quantization = values.get("producer"), values.get("quantization")
    if not isinstance(quantization, dict):
        raise CheckpointError(f"{path} has no object 'quantization': download it again")
    name = producer.get("name") if isinstance(producer, dict) else None
    if name not in (None, "modelopt"):
        raise ConfigError(f"{path} is by {name!r}, expected 'modelopt': use a checkpoint quantized by another tool")
    return None if quantization.get("quant_algo") is None else {"quant_method": "modelopt", **quantization}


def _gptq(values: dict[str, Any], _path: Path) -> dict[str, Any] | None:
    """Reads the file of AutoGPTQ and its successors, which has config.json's object; None for another tool's file."""
    return {"quant_method": "gptq", **values} if {"bits", "quant_method"} & values.keys() else None


def _awq(values: dict[str, Any], _path: Path) -> dict[str, Any] | None:
    """Reads AutoAWQ's file, which has two keys under older names. None if it is another tool's."""
    names = {"w_bit": "bits", "q_group_size": "group_size"}
    described = {"quant_method": "awq", **{names.get(key, key): value for key, value in values.items()}}
    if isinstance(version := described.get("version"), str):
        described["version"] = version.lower()
    return described if "bits" in described else None


QUANTIZATION_FILES: Mapping[str, Callable[[dict[str, Any], Path], dict[str, Any] | None]] = {
    "hf_quant_config.json": _modelopt,
    "quantize_config.json": _gptq,
    "quant_config.json": _awq,
}
"""Name of a file beside config.json -> reader of its content as a `quantization_config`."""
