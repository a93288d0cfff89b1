"""Converts checkpoints between Hugging Face and Orbax format: every tensor bit for bit, one at a time.

The output is written to a folder beside the destination, `.NAME.partial`, which is renamed once it is complete. An
interrupted conversion continues from the contents of that folder.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from jaxis.bringup.convert.completeness import check_complete
from jaxis.bringup.convert.orbax_writer import OrbaxWriter
from jaxis.bringup.convert.partial_folder import (
    Conversion,
    ConversionProgress,
    OnProgress,
    partial_folder,
    write_safetensors,
)
from jaxis.errors import CheckpointError
from jaxis.loading.checkpoint import Checkpoint
from jaxis.loading.checkpoint_files import MAX_SHARD_BYTES, check_destination, copy_other_files
from jaxis.loading.gguf.gguf_checkpoint import GGUFCheckpoint
from jaxis.loading.open_checkpoint import open_checkpoint
from jaxis.loading.orbax_checkpoint import PARAMS, OrbaxCheckpoint, is_orbax_checkpoint, write_layout
from jaxis.loading.tensor_layout import ArraySpec, scanned_layout, unscanned_layout

FORMATS = ("orbax", "hf")


def convert_checkpoint(
    source: Path,
    destination: Path,
    to: str,
    *,
    scanned: bool = False,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    on_progress: OnProgress | None = None,
) -> Conversion:
    """Writes the checkpoint `source` in the format "orbax" or "hf"; config, tokenizer and model card are copied.

    For "orbax", `scanned` stacks layers with the same tensors in one array `[layers, ...]`, experts on another axis.
    For "hf", a file has at most `max_shard_bytes`, unless a single tensor is larger. `on_progress` gets (bytes done,
    bytes in all).

    Raises:
      ConfigError: jaxis does not support the model, so it cannot tell whether the source is complete.
      CheckpointError: The source cannot be read, lacks tensors or has others, or is already in that format; or the
        destination exists, cannot be written, or an interrupted run there was of another source.
    """
    check_destination(destination)
    if to == "hf" and not is_orbax_checkpoint(source):
        raise CheckpointError(f"{source} is already in Hugging Face format: give the folder of an Orbax checkpoint")
    with open_checkpoint(source) as checkpoint:
        if isinstance(checkpoint, GGUFCheckpoint):
            raise CheckpointError(f"{source} is a GGUF file: convert it with --to hf first")
        check_complete(source, checkpoint)
        if to == "orbax" and isinstance(checkpoint, OrbaxCheckpoint) and checkpoint.is_scanned == scanned:
            layout = "scanned" if scanned else "unscanned"
            raise CheckpointError(f"{source} is already an {layout} Orbax checkpoint")
        with partial_folder(destination, _fingerprint(source, checkpoint, to, scanned, max_shard_bytes)) as partial:
            progress = ConversionProgress(checkpoint, on_progress)
            if to == "orbax":
                num_arrays = _write_orbax(partial, checkpoint, scanned, progress)
            else:
                num_arrays = write_safetensors(partial, checkpoint, max_shard_bytes, progress)
            copy_other_files(source, partial)
            shutil.copyfile(source / "config.json", partial / "config.json")
    return Conversion(len(checkpoint.names()), checkpoint.total_bytes, progress.resumed_bytes, num_arrays)


def _fingerprint(
    source: Path, checkpoint: Checkpoint | OrbaxCheckpoint, to: str, scanned: bool, max_shard_bytes: int
) -> str:
    """Returns a hash of the conversion: equal only for the same request and files, judged by size and time."""
    what: list[object] = [to, scanned if to == "orbax" else max_shard_bytes]
    what += [
        (name, str(info.dtype), info.shape) for name, info in ((n, checkpoint.info(n)) for n in checkpoint.names())
    ]
    what += sorted((p.name, p.stat().st_size, p.stat().st_mtime_ns) for p in source.iterdir() if p.is_file())
    return hashlib.sha256(json.dumps(what).encode()).hexdigest()


def _write_orbax(
    partial: Path, checkpoint: Checkpoint | OrbaxCheckpoint, scanned: bool, progress: ConversionProgress
) -> int:
    tensors = {name: ArraySpec(checkpoint.info(name).shape, checkpoint.info(name).dtype) for name in checkpoint.names()}
    layout = scanned_layout(tensors) if scanned else unscanned_layout(tensors)
    writer = OrbaxWriter(partial / PARAMS, layout)
    todo = {name for name in tensors if not writer.has(name)}
    for name in tensors.keys() - todo:
        progress.add(name, resumed=True)
    for name, tensor in _read(checkpoint, todo):
        writer.write(name, tensor)
        progress.add(name)
    write_layout(partial, layout, is_scanned=scanned)
    return len(layout.arrays)


def _read(checkpoint: Checkpoint | OrbaxCheckpoint, names: set[str]) -> Iterator[tuple[str, np.ndarray]]:
    if isinstance(checkpoint, Checkpoint):
        for name, tensor in checkpoint.iterate():
            if name in names:
                yield name, tensor
        return
    for name in checkpoint.names():
        if name in names:
            yield name, checkpoint.tensor(name)
