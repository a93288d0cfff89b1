"""Converts checkpoints between Hugging Face and Orbax format: every tensor bit for bit, one at a time.

The output is written to a folder beside the destination, `.NAME.partial`, which is renamed once it is complete. An
interrupted conversion continues from the contents of that folder.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jaxis.bringup.analyze.config import construct
from jaxis.bringup.analyze.tensors import check_tensors
from jaxis.bringup.convert.orbax_writer import OrbaxWriter
from jaxis.config.quantization_files import read_config
from jaxis.errors import CheckpointError, ConfigError
from jaxis.loading.checkpoint import Checkpoint
from jaxis.loading.checkpoint_files import MAX_SHARD_BYTES, Shard, copy_other_files, plan_shards, write_index
from jaxis.loading.open_checkpoint import open_checkpoint
from jaxis.loading.orbax_checkpoint import PARAMS, OrbaxCheckpoint, is_orbax_checkpoint, write_layout
from jaxis.loading.safetensors_writer import SafetensorsWriter, TensorHeader
from jaxis.loading.tensor_layout import ArraySpec, scanned_layout, unscanned_layout

FORMATS = ("orbax", "hf")
_SOURCE_FILE = ".source"  # in the partial folder: identifies the conversion

OnProgress = Callable[[int, int], None]


@dataclass(frozen=True)
class Conversion:
    """The result of a conversion.

    Attributes:
      num_tensors: Tensors of the source.
      total_bytes: Bytes of all tensors.
      resumed_bytes: How many of those an earlier, interrupted run had written.
      num_arrays: Arrays or files that now hold them.
    """

    num_tensors: int
    total_bytes: int
    resumed_bytes: int
    num_arrays: int


def convert_checkpoint(
    source: Path,
    destination: Path,
    to: str,
    *,
    scanned: bool = False,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    on_progress: OnProgress | None = None,
) -> Conversion:
    """Writes the checkpoint `source` in another format; config, tokenizer and model card are copied.

    Args:
      source: A folder in either format.
      destination: A folder that does not exist yet.
      to: "orbax" or "hf" (safetensors files).
      scanned: With "orbax": stack layers with the same tensors in one array `[layers, ...]`, experts on another axis.
      max_shard_bytes: With "hf": most bytes of a file, unless a single tensor is larger.
      on_progress: Called with (bytes done, bytes in all).

    Raises:
      ConfigError: jaxis does not support the model, so it cannot tell whether the source is complete.
      CheckpointError: The source cannot be read, lacks tensors or has others, or is already in that format; or the
        destination exists, cannot be written, or an interrupted run there was of another source.
    """
    if destination.exists():
        raise CheckpointError(f"{destination} already exists: give a folder that does not exist, or remove it")
    if not destination.absolute().parent.is_dir():
        raise CheckpointError(f"{destination.absolute().parent} is not a folder: make it first")
    if to == "hf" and not is_orbax_checkpoint(source):
        raise CheckpointError(f"{source} is already in Hugging Face format: give the folder of an Orbax checkpoint")
    partial = destination.absolute().with_name(f".{destination.name}.partial")
    with open_checkpoint(source) as checkpoint:
        _check_complete(source, checkpoint)
        if to == "orbax" and isinstance(checkpoint, OrbaxCheckpoint) and checkpoint.is_scanned == scanned:
            layout = "scanned" if scanned else "unscanned"
            raise CheckpointError(f"{source} is already an {layout} Orbax checkpoint")
        try:
            _begin(partial, _fingerprint(source, checkpoint, to, scanned, max_shard_bytes), destination)
            progress = _Progress(checkpoint, on_progress)
            if to == "orbax":
                num_arrays = _write_orbax(partial, checkpoint, scanned, progress)
            else:
                num_arrays = _write_safetensors(partial, checkpoint, max_shard_bytes, progress)
            copy_other_files(source, partial)
            shutil.copyfile(source / "config.json", partial / "config.json")
            (partial / _SOURCE_FILE).unlink()
            partial.rename(destination)
        except OSError as error:
            raise CheckpointError(
                f"{destination} cannot be written: {error.strerror or error}; what was written stays in {partial}, "
                "and the same command resumes from there"
            ) from error
    return Conversion(len(checkpoint.names()), checkpoint.total_bytes, progress.resumed_bytes, num_arrays)


def _check_complete(source: Path, checkpoint: Checkpoint | OrbaxCheckpoint) -> None:
    """Checks that the model takes every tensor and lacks none, from names and shapes alone."""
    tensors = {name: checkpoint.info(name) for name in checkpoint.names()}
    construction = construct(read_config(source), str(source / "config.json"), tensors=tensors)
    if construction.model is None or construction.refusals:
        why = construction.refusals[0] if construction.refusals else "its architecture is not supported"
        raise ConfigError(f"{source} cannot be converted: {why}; jaxis analyze {source} says more")
    quant_config = None if construction.vllm_config is None else construction.vllm_config.quant_config
    problems = check_tensors(construction.model, tensors, quant_config)
    if problems:
        first = problems[0]
        raise CheckpointError(
            f"{source}: {first.kind}: {first.names}: {first.reason} (1 of {len(problems)} problems with its tensors; "
            f"jaxis analyze {source} lists them)"
        )


class _Progress:
    def __init__(self, checkpoint: Checkpoint | OrbaxCheckpoint, on_progress: OnProgress | None) -> None:
        self._checkpoint, self._on_progress = checkpoint, on_progress
        self._done = self.resumed_bytes = 0

    def add(self, name: str, *, resumed: bool) -> None:
        nbytes = self._checkpoint.info(name).nbytes
        self._done += nbytes
        self.resumed_bytes += nbytes if resumed else 0
        if self._on_progress is not None:
            self._on_progress(self._done, self._checkpoint.total_bytes)


def _begin(partial: Path, fingerprint: str, destination: Path) -> None:
    """Creates the partial folder, or checks that an existing one belongs to this conversion."""
    marker = partial / _SOURCE_FILE
    if partial.exists():
        if not marker.exists() or marker.read_text() != fingerprint:
            raise CheckpointError(
                f"{partial} is left over from another conversion to {destination}: remove it, or "
                "give another destination"
            )
        return
    partial.mkdir()
    marker.write_text(fingerprint)


def _fingerprint(
    source: Path, checkpoint: Checkpoint | OrbaxCheckpoint, to: str, scanned: bool, max_shard_bytes: int
) -> str:
    """A hash of the conversion: equal only for the same files, judged by size and time, and the same request."""
    what: list[object] = [to, scanned if to == "orbax" else max_shard_bytes]
    what += [
        (name, str(info.dtype), info.shape) for name, info in ((n, checkpoint.info(n)) for n in checkpoint.names())
    ]
    what += sorted((p.name, p.stat().st_size, p.stat().st_mtime_ns) for p in source.iterdir() if p.is_file())
    return hashlib.sha256(json.dumps(what).encode()).hexdigest()


def _write_orbax(partial: Path, checkpoint: Checkpoint | OrbaxCheckpoint, scanned: bool, progress: _Progress) -> int:
    tensors = {name: ArraySpec(checkpoint.info(name).shape, checkpoint.info(name).dtype) for name in checkpoint.names()}
    layout = scanned_layout(tensors) if scanned else unscanned_layout(tensors)
    writer = OrbaxWriter(partial / PARAMS, layout)
    todo = {name for name in tensors if not writer.has(name)}
    for name in tensors.keys() - todo:
        progress.add(name, resumed=True)
    for name, tensor in _read(checkpoint, todo):
        writer.write(name, tensor)
        progress.add(name, resumed=False)
    write_layout(partial, layout, is_scanned=scanned)
    return len(layout.arrays)


def _write_safetensors(
    partial: Path, checkpoint: Checkpoint | OrbaxCheckpoint, max_shard_bytes: int, progress: _Progress
) -> int:
    specs = [
        {name: TensorHeader(checkpoint.info(name).dtype, checkpoint.info(name).shape)} for name in checkpoint.names()
    ]
    shards = plan_shards(specs, max_shard_bytes)
    for shard in shards:
        _write_shard(partial, shard, checkpoint, progress)
    write_index(partial, shards)
    return len(shards)


def _write_shard(partial: Path, shard: Shard, checkpoint: Checkpoint | OrbaxCheckpoint, progress: _Progress) -> None:
    """Writes one file, under a temporary name until it is complete: a file with its final name is never partial."""
    done = (partial / shard.name).exists()
    if not done:
        growing = partial / f"{shard.name}.growing"
        with SafetensorsWriter(growing, shard.specs) as writer:
            for name in shard.specs:
                writer.write(name, checkpoint.tensor(name))
                progress.add(name, resumed=False)
        growing.rename(partial / shard.name)
        return
    for name in shard.specs:
        progress.add(name, resumed=True)


def _read(checkpoint: Checkpoint | OrbaxCheckpoint, names: set[str]) -> Iterator[tuple[str, np.ndarray]]:
    """Reads the named tensors, one in memory at a time, in the order of the files."""
    if isinstance(checkpoint, Checkpoint):
        for name, tensor in checkpoint.iterate():
            if name in names:
                yield name, tensor
        return
    for name in checkpoint.names():
        if name in names:
            yield name, checkpoint.tensor(name)
