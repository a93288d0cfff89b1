"""Source of a model's vision tower: its checkpoint, or the `mmproj` file of a GGUF model."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from jaxis.config.hf_config import HFConfig
from jaxis.engine.execution.extra_memory import LeftOut
from jaxis.errors import CheckpointError, ConfigError
from jaxis.host.closing import Closing
from jaxis.kernels.weights import dequantize
from jaxis.loading.gguf_files import mmproj_beside
from jaxis.loading.open_checkpoint import TensorListing
from jaxis.loading.packed_name import is_packed
from jaxis.models.common.text_part import TextPart
from jaxis.models.registry import model_class_of
from jaxis.packed.folder import PackedFolder
from jaxis.rooms import room_module

if TYPE_CHECKING:
    from jaxis.loading.gguf.container import GGUFTensor
    from jaxis.loading.gguf.mmproj import MmprojFile
    from jaxis.models.common.towers.tower import VisionTower


def _towers() -> Mapping[str, type[VisionTower]]:
    """Returns the towers by the kinds of mmproj files."""
    from jaxis.models.common.towers.gemma3 import Gemma3Vision
    from jaxis.models.common.towers.idefics3 import Idefics3Vision
    from jaxis.models.common.towers.qwen import Qwen2_5VLVision, Qwen2VLVision, Qwen3VLVision

    return {
        "qwen2vl_merger": Qwen2VLVision,
        "qwen2.5vl_merger": Qwen2_5VLVision,
        "qwen3vl_merger": Qwen3VLVision,
        "gemma3": Gemma3Vision,
        "idefics3": Idefics3Vision,
    }


class MmprojTensors(Closing):
    """The tensors of an `mmproj` file as floats, for `load_model`. A context manager.

    Args:
      path: The file.

    Attributes:
      total_bytes: Bytes of all tensors in the file.
    """

    def __init__(self, path: Path) -> None:
        self._file = _mmproj_file(path)
        self.total_bytes = self._file.total_bytes

    def iterate(self) -> Iterator[tuple[str, np.ndarray]]:
        """Yields every tensor once."""
        return self._file.iterate(_floats)

    def close(self) -> None:
        self._file.close()


@dataclass(frozen=True)
class TowerSource:
    """A tower that can be loaded.

    Attributes:
      tower_class: Class of the tower.
      config: Configuration with the tower's `vision_config`.
      files: Folder of the checkpoint, or `mmproj` file, with the processor's settings.
    """

    tower_class: type[VisionTower]
    config: HFConfig
    files: Path

    @property
    def mmproj(self) -> Path | None:
        """The `mmproj` file, if the tower is in one."""
        return self.files if self.files.is_file() else None


def tower_source(path: Path, hf_config: HFConfig, mmproj: Path | None, *, is_made_up: bool) -> TowerSource | LeftOut:
    """Returns the tower of a checkpoint, or the reason for which there is none to load.

    Args:
      path: The checkpoint's folder, or its GGUF file.
      hf_config: The checkpoint's.
      mmproj: The file that a user names; None takes what lies beside a GGUF file.
      is_made_up: True if weights are made, not read.

    Raises:
      ConfigError: `mmproj` is not one of the model.
      CheckpointError: `mmproj` cannot be read.
    """
    if mmproj is not None:
        if not path.is_file():
            raise ConfigError(f"mmproj={str(mmproj)!r} is for models in GGUF files, and {path} is none: leave it out")
        return _in_mmproj(mmproj, hf_config)
    if path.is_file():
        beside = mmproj_beside(path)
        if beside is None:
            return LeftOut(
                "images need an mmproj file, and none lies beside the GGUF file: give it with --mmproj", True
            )
        try:
            return _in_mmproj(beside, hf_config)
        except (ConfigError, CheckpointError) as error:
            return LeftOut(str(error), is_chosen=False)
    model_class = model_class_of(hf_config)
    if not issubclass(model_class, TextPart):
        return LeftOut("", is_chosen=True)
    tower_class = model_class.tower
    if tower_class is None:
        return LeftOut("jaxis has the text part of this model only: send text", is_chosen=True)
    if is_packed(path):
        has_tower = tower_class.__name__ in PackedFolder(path).parts
    else:
        has_tower = path.is_dir() and any(map(tower_class.has_tensor, TensorListing(path)))
    if not is_made_up and not has_tower:
        return LeftOut("the checkpoint's files have no vision tower", is_chosen=False)
    return TowerSource(tower_class, hf_config, path)


def _mmproj_file(path: Path) -> MmprojFile:
    return room_module("loading.gguf", "mmproj", str(path)).MmprojFile(path)


def _in_mmproj(path: Path, hf_config: HFConfig) -> TowerSource:
    text = hf_config.to_dict()
    with _mmproj_file(path) as file:
        if file.size != text.get("hidden_size"):
            raise ConfigError(
                f"{path} makes embeddings of {file.size} elements, and the model's have {text.get('hidden_size')}: "
                "give the mmproj file of this model"
            )
        # The text's keys say whether its RoPE counts rows and columns.
        config = HFConfig({**text, **file.config}, source=str(path))
        return TowerSource(_towers()[file.kind], config, path)


def _floats(tensor: GGUFTensor, stored: np.ndarray) -> np.ndarray:
    if tensor.block_type.dtype is not None:
        return stored
    from jaxis.quantization.formats.gguf import read_blocks

    shape = (math.prod(tensor.shape[:-1]), tensor.shape[-1])
    weight = read_blocks(tensor.block_type, stored.reshape(shape[0], -1), shape)
    return np.asarray(dequantize(weight), np.float32).reshape(tensor.shape)
