"""The input of an analysis: a config, and the headers of the weights if there are any."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxis.config.hf_config import HFConfig, with_overrides
from jaxis.config.quantization_files import config_path, read_config, with_quantization
from jaxis.errors import CheckpointError, ConfigError
from jaxis.host.json_object import read_json_object
from jaxis.loading.gguf_files import gguf_file
from jaxis.loading.hub_headers import download_config, hub_tensor_infos
from jaxis.loading.open_checkpoint import ConfigValues, read_config_values, read_tensor_infos
from jaxis.loading.orbax_checkpoint import is_orbax_checkpoint
from jaxis.loading.safetensors import TensorInfo
from jaxis.models.tied_tables import tables_of, tie_keys


@dataclass(frozen=True)
class ModelSource:
    """A model to analyse, with the quantization that files beside config.json describe, and the reason for missing
    weights.

    Attributes:
      config: Parsed config.json. It says whether the head is tied as a folder's tensors do.
      tensors: Tensor name -> header, in the checkpoint's order; None without weights.
    """

    name: str
    config_path: str
    config: dict[str, Any]
    tensors: dict[str, TensorInfo] | None
    no_tensors_reason: str = ""


def open_source(model: str | os.PathLike[str], *, revision: str | None = None) -> ModelSource:
    """Reads config.json and the safetensors headers of a folder, a Hub id, a GGUF file, or config.json alone.

    From the Hub, only these are downloaded. Raises CheckpointError if there is no such model, or a file is broken.
    """
    name = os.fspath(model)
    path = Path(name).expanduser()
    if path.is_file() and path.suffix == ".json":
        is_own = path == config_path(path.parent)
        config = read_config(path.parent) if is_own else with_quantization(read_json_object(path))
        return ModelSource(name, str(path), config, None, "config.json alone was given")
    if path.is_file() and gguf_file(path) is None:
        raise CheckpointError(
            f"{name} is not a config.json: give one, a folder, a GGUF file, or a Hub id such as Qwen/Qwen3-0.6B"
        )
    if path.exists():
        config, has_files = read_config_values(path), any(path.glob("*.safetensors*"))
        if not has_files and gguf_file(path) is None and not is_orbax_checkpoint(path):
            return ModelSource(name, config.source, config.values, None, "the folder has no *.safetensors files")
        values = _with_tables(config, path) if has_files else config.values
        return ModelSource(name, config.source, values, read_tensor_infos(path))
    if not name or name.startswith((".", "~")) or path.is_absolute() or "\\" in name or name.count("/") > 1:
        raise CheckpointError(
            f"there is no {name!r}: give a folder, a config.json, or a Hub id such as Qwen/Qwen3-0.6B"
        )
    file = download_config(name, revision=revision)
    tensors = hub_tensor_infos(name, revision=revision)
    reason = "the repository has no model*.safetensors weights" if tensors is None else ""
    return ModelSource(name, str(file), read_config(file.parent), tensors, reason)


def _with_tables(config: ConfigValues, folder: Path) -> dict[str, Any]:
    """Returns the config with what the folder's tensors say of embeddings and head; keys stay as they are written."""
    written = HFConfig(config.values, source=config.source)
    try:
        decided = tables_of(written, folder).config
    except ConfigError:  # the analysis says it
        return config.values
    return with_overrides(config.values, {} if decided is written else tie_keys(decided), config.source)
