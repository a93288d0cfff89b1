"""The folder that a conversion fills: hidden until it is complete, and resumed after an interruption."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from jaxis.errors import CheckpointError
from jaxis.loading.checkpoint_files import Shard, plan_shards, write_index
from jaxis.loading.safetensors import TensorInfo
from jaxis.loading.safetensors_writer import SafetensorsWriter, TensorHeader

_SOURCE_FILE = ".source"  # in the partial folder: identifies the conversion

OnProgress = Callable[[int, int], None]


@dataclass(frozen=True)
class Conversion:
    """Sizes of a conversion: tensors, their bytes and those of an earlier, interrupted run, and arrays or files
    written.
    """

    num_tensors: int
    total_bytes: int
    resumed_bytes: int
    num_arrays: int


class TensorSource(Protocol):
    """Tensors by name, such as a checkpoint's."""

    total_bytes: int

    def names(self) -> Sequence[str]: ...

    def info(self, name: str) -> TensorInfo | TensorHeader: ...

    def tensor(self, name: str) -> np.ndarray: ...


@contextmanager
def partial_folder(destination: Path, fingerprint: str) -> Iterator[Path]:
    """Yields the folder `.NAME.partial` beside the destination, which becomes the destination when the block ends.

    After an error it stays, and the next conversion with the same fingerprint continues with its contents. Raises
    CheckpointError if the folder is of another conversion, or something cannot be written.
    """
    partial = destination.absolute().with_name(f".{destination.name}.partial")
    try:
        _begin(partial, fingerprint, destination)
        yield partial
        (partial / _SOURCE_FILE).unlink()
        partial.rename(destination)
    except OSError as error:
        raise CheckpointError(
            f"{destination} cannot be written: {error.strerror or error}; what was written stays in {partial}, "
            "and the same command resumes from there"
        ) from error


def _begin(partial: Path, fingerprint: str, destination: Path) -> None:
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


class ConversionProgress:
    """Counts the bytes that are done, and those (`resumed_bytes`) of tensors that were there already."""

    def __init__(self, tensors: TensorSource, on_progress: OnProgress | None) -> None:
        self._tensors, self._on_progress = tensors, on_progress
        self._done = self.resumed_bytes = 0

    def add(self, name: str, *, resumed: bool = False) -> None:
        """Counts a tensor that is written, or was already."""
        nbytes = self._tensors.info(name).nbytes
        self._done += nbytes
        self.resumed_bytes += nbytes if resumed else 0
        if self._on_progress is not None:
            self._on_progress(self._done, self._tensors.total_bytes)


def write_safetensors(partial: Path, tensors: TensorSource, max_shard_bytes: int, progress: ConversionProgress) -> int:
    """Writes tensors to safetensors files and their index; returns the number of files.

    Files that are in the folder already are complete. A file has at most `max_shard_bytes`, unless a single tensor is
    larger.
    """
    specs = [{name: TensorHeader(tensors.info(name).dtype, tensors.info(name).shape)} for name in tensors.names()]
    shards = plan_shards(specs, max_shard_bytes)
    for shard in shards:
        _write_shard(partial, shard, tensors, progress)
    write_index(partial, shards)
    return len(shards)


def _write_shard(partial: Path, shard: Shard, tensors: TensorSource, progress: ConversionProgress) -> None:
    """Writes one file, under a temporary name until it is complete: a file with its final name is never partial."""
    done = (partial / shard.name).exists()
    if not done:
        growing = partial / f"{shard.name}.growing"
        with SafetensorsWriter(growing, shard.specs) as writer:
            for name in shard.specs:
                writer.write(name, tensors.tensor(name))
                progress.add(name)
        growing.rename(partial / shard.name)
        return
    for name in shard.specs:
        progress.add(name, resumed=True)
