"""The finished model: a Hugging Face folder with all weights, or PEFT's files of adapters."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from jaxis.errors import CheckpointError
from jaxis.layers.checkpoint_names import CheckpointNames
from jaxis.loading.checkpoint_files import MAX_SHARD_BYTES, copy_other_files, plan_shards, write_index
from jaxis.loading.open_checkpoint import open_checkpoint
from jaxis.loading.safetensors_writer import SafetensorsWriter, TensorHeader
from jaxis.lora.merge import MergedAdapter
from jaxis.training.checkpoint import sync
from jaxis.training.tensor_places import TensorPlaces

# Written last: without them a folder is no model and no adapter.
_LAST = ("config.json", "adapter_config.json")
# What says of the base how it came about; a base that was trained here has a run's own files.
_OF_THE_BASE = ("README.md", "metrics.jsonl", "answers.jsonl", "report.html")

ChangeTensor = Callable[[str, np.ndarray], np.ndarray]
"""(A tensor's name in the checkpoint, the tensor) -> what it is in the finished model."""


@contextmanager
def placed_into(output: Path) -> Iterator[Path]:
    """A folder to write files into, which are moved into the output when all of them are on the disk.

    Raises:
      CheckpointError: Something cannot be written.
    """
    try:
        output.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".final-", dir=output) as name:
            folder = Path(name)
            yield folder
            names = sorted(folder.iterdir(), key=lambda path: path.name in _LAST)
            for path in names:
                if path.is_file():
                    sync(path)
            for path in names:
                if path.is_dir():
                    shutil.rmtree(output / path.name, ignore_errors=True)
                path.replace(output / path.name)
            sync(output)
    except OSError as error:
        raise CheckpointError(f"{output} cannot be written: {error.strerror or error}; free space, and go on") from None


def replaced_by(places: TensorPlaces, trained: Mapping[str, np.ndarray]) -> ChangeTensor:
    """What puts trained weights, by their names here, into the places of the checkpoint's."""

    def changed(name: str, tensor: np.ndarray) -> np.ndarray:
        value = places.tensor_of(name, trained)
        return tensor if value is None else value.astype(tensor.dtype)

    return changed


def merged_with(adapter: Path, names: CheckpointNames) -> ChangeTensor:
    """What adds adapters to the checkpoint's tensors.

    Args:
      adapter: Their folder.
      names: The model's.
    """
    return MergedAdapter(adapter).begin(names.name_here).changed


def write_model(source: Path, folder: Path, change: ChangeTensor, *, is_tied: bool) -> None:
    """Writes a model: the checkpoint with other weights, and all that is beside them.

    Args:
      source: The checkpoint.
      folder: Where to.
      change: What becomes of each tensor.
      is_tied: Whether the head is the embeddings, so that a copy of them that the checkpoint may have is left out.
    """
    copy_other_files(source, folder)
    for name in _OF_THE_BASE:
        (folder / name).unlink(missing_ok=True)
    shutil.copyfile(source / "config.json", folder / "config.json")
    with open_checkpoint(source) as checkpoint:
        names = [name for name in checkpoint.names() if not (is_tied and name.endswith("lm_head.weight"))]
        specs = [{name: TensorHeader(checkpoint.info(name).dtype, checkpoint.info(name).shape)} for name in names]
        shards = plan_shards(specs, MAX_SHARD_BYTES)
        for shard in shards:
            with SafetensorsWriter(folder / shard.name, shard.specs) as writer:
                for name in shard.specs:
                    writer.write(name, change(name, np.asarray(checkpoint.tensor(name))))
        write_index(folder, shards)


def write_template(folder: Path, template: str) -> None:
    """Writes the chat template that a model was trained with."""
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
