"""Writes a checkpoint in Hugging Face's format with other weights: trained ones, or ones with an adapter merged in."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from jaxis.config.hf_config import HFConfig
from jaxis.host.json_object import read_json_object
from jaxis.layers.checkpoint_names import CheckpointNames
from jaxis.loading.checkpoint_files import MAX_SHARD_BYTES, copy_other_files, plan_shards, write_index
from jaxis.loading.open_checkpoint import open_checkpoint, read_hf_config
from jaxis.loading.safetensors_writer import SafetensorsWriter, TensorHeader
from jaxis.models.common.tables import EMBEDDINGS, HEAD, other_table
from jaxis.models.tied_tables import Tables, tie_keys

# Files that describe how the source checkpoint came about; a checkpoint trained here has files of its own run.
_OF_THE_SOURCE = ("README.md", "metrics.jsonl", "answers.jsonl")

ChangeTensor = Callable[[str, np.ndarray], np.ndarray]
"""(name of a tensor in the checkpoint, tensor) -> the tensor to write instead."""


def write_changed(
    source: Path, folder: Path, change: ChangeTensor, names: CheckpointNames, tables: Tables, *, is_tied: bool
) -> None:
    """Writes a checkpoint with other weights, each tensor changed by `change`, and copies all other files.

    If the head is tied to the embeddings, a copy of them in the checkpoint is left out.
    """
    copy_other_files(source, folder)
    for name in _OF_THE_SOURCE:
        (folder / name).unlink(missing_ok=True)
    _write_config(source, folder, tables.config)
    with open_checkpoint(source) as checkpoint:
        read_from = _tensors_to_write(checkpoint.names(), names, is_tied=is_tied, are_split=tables.are_split)
        infos = {name: checkpoint.info(stored) for name, stored in read_from.items()}
        shards = plan_shards(
            [{name: TensorHeader(info.dtype, info.shape)} for name, info in infos.items()], MAX_SHARD_BYTES
        )
        for shard in shards:
            with SafetensorsWriter(folder / shard.name, shard.specs) as writer:
                for name in shard.specs:
                    writer.write(name, change(name, np.asarray(checkpoint.tensor(read_from[name]))))
        write_index(folder, shards)


def _tensors_to_write(
    stored: Iterable[str], names: CheckpointNames, *, is_tied: bool, are_split: bool
) -> dict[str, str]:
    """Returns the name of each tensor to write -> the name of the tensor that it is made from."""
    read_from = {name: name for name in stored}
    found = {here: name for name in read_from if (here := names.name_here(name)) in (EMBEDDINGS, HEAD)}
    if is_tied and len(found) == 2:
        del read_from[found[HEAD]]
    if are_split and len(found) == 1:
        [(here, name)] = found.items()
        read_from[names.name_in_checkpoint(other_table(here))] = name
    return read_from


def _write_config(source: Path, folder: Path, config: HFConfig) -> None:
    """Writes config.json, with the keys that tell whether the head is tied."""
    path, said = folder / "config.json", tie_keys(config)
    shutil.copyfile(source / "config.json", path)
    if said == tie_keys(read_hf_config(source)):
        return
    values = read_json_object(path)
    for dotted, is_tied in said.items():
        *parents, key = dotted.split(".")
        section: Any = values
        for parent in parents:
            section = section[parent]
        section[key] = is_tied
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
