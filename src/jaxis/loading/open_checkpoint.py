"""Opens a checkpoint of any format: its weights, its config, its generation settings."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from jaxis.config.generation_config import load_generation_defaults
from jaxis.config.hf_config import HFConfig
from jaxis.config.quantization_files import config_path, read_config
from jaxis.errors import CheckpointError
from jaxis.loading.checkpoint import Checkpoint
from jaxis.loading.gguf_files import gguf_file
from jaxis.loading.orbax_checkpoint import OrbaxCheckpoint, is_orbax_checkpoint
from jaxis.loading.packed_name import is_packed
from jaxis.loading.safetensors import TensorInfo, TensorInfos
from jaxis.rooms import room_module

if TYPE_CHECKING:
    from jaxis.loading.gguf.gguf_checkpoint import GGUFCheckpoint

OpenCheckpoint: TypeAlias = "Checkpoint | OrbaxCheckpoint | GGUFCheckpoint"


def gguf_module(name: str, file: Path) -> Any:
    """Returns a module of the room that reads GGUF files. Raises ConfigError if it is not installed."""
    return room_module("loading.gguf", name, str(file))


@dataclass(frozen=True)
class ConfigValues:
    """Content of a checkpoint's config.

    Attributes:
      values: config.json, or the corresponding values of a GGUF file.
      source: Origin of the values, for errors.
      assumptions: Values that a GGUF file does not contain and that are assumed.
    """

    values: dict[str, Any]
    source: str
    assumptions: tuple[str, ...] = ()


def open_checkpoint(path: str | os.PathLike[str]) -> OpenCheckpoint:
    """Opens a GGUF file, or a folder's safetensors files, Orbax checkpoint or GGUF files.

    Raises:
      CheckpointError: A file is missing or broken, or the folder is packed.
      ConfigError: A GGUF file's architecture, or a key in it, is not supported.
    """
    if (file := gguf_file(path)) is not None:
        return gguf_module("gguf_checkpoint", file).GGUFCheckpoint(file)
    if is_packed(path):
        raise CheckpointError(f"{path} is packed, and has no tensors to read: give the model that it was packed from")
    return OrbaxCheckpoint(path) if is_orbax_checkpoint(Path(path)) else Checkpoint(path)


def read_config_values(path: str | os.PathLike[str]) -> ConfigValues:
    """Reads a checkpoint's config. Raises CheckpointError if there is none, or it cannot be read.

    Raises ConfigError for a GGUF file whose keys are not supported.
    """
    if (file := gguf_file(path)) is not None:
        with gguf_module("gguf_checkpoint", file).GGUFCheckpoint(file) as checkpoint:
            return ConfigValues(checkpoint.config, str(checkpoint.path), checkpoint.assumptions)
    return ConfigValues(read_config(path), str(config_path(path)))


def read_hf_config(path: str | os.PathLike[str]) -> HFConfig:
    """Reads a checkpoint's config as an HFConfig, for models; see `read_config_values` and `HFConfig`."""
    config = read_config_values(path)
    return HFConfig(config.values, source=config.source)


def read_generation_defaults(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Reads the sampling settings that a checkpoint's makers recommend; see `load_generation_defaults`."""
    file = gguf_file(path)
    if file is None:
        return load_generation_defaults(path)
    return gguf_module("generation", file).gguf_generation_defaults(file)


def read_tensor_infos(folder: str | os.PathLike[str]) -> TensorInfos:
    """Returns types and shapes of a checkpoint's tensors. Raises CheckpointError as `open_checkpoint` does."""
    with open_checkpoint(folder) as checkpoint:
        metadata = checkpoint.metadata if isinstance(checkpoint, Checkpoint) else {}
        return TensorInfos({name: checkpoint.info(name) for name in checkpoint.names()}, metadata)


class TensorListing(Mapping[str, TensorInfo]):
    """Names, types and shapes of a checkpoint's tensors, which show how its modules are stored.

    `open_checkpoint` opens the folder when the listing is first used, and may raise CheckpointError then.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._folder = folder

    @functools.cached_property
    def infos(self) -> TensorInfos:
        return read_tensor_infos(self._folder)

    @property
    def metadata(self) -> dict[str, str]:
        return self.infos.metadata

    def __getitem__(self, name: str) -> TensorInfo:
        return self.infos[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.infos)

    def __len__(self) -> int:
        return len(self.infos)
