"""Checkpoints of a training run: all state that the next step depends on.

A checkpoint is a folder with a safetensors file of arrays and a JSON file of everything else. It is written to a
folder beside its place, synced to the disk and renamed, so a folder with a checkpoint's name is always complete.
Safetensors need no further dependency, since jaxis has a writer for them, and they keep arrays bit for bit.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxis.errors import CheckpointError, ConfigError
from jaxis.host.json_object import read_json_object
from jaxis.loading.safetensors import SafetensorsFile
from jaxis.loading.safetensors_writer import write_tensors

_STATE, _ARRAYS = "trainer_state.json", "state.safetensors"
_NAME = re.compile(r"checkpoint-(\d+)")
_MAX_STATE_BYTES = 16 << 20


@dataclass(frozen=True)
class TrainState:
    """Everything that a step changes.

    Attributes:
      step: Number of steps done.
      trained: Trained arrays, float32, by name.
      moments: State of the optimizer.
    """

    step: int
    trained: dict[str, jax.Array]
    moments: Any


@dataclass(frozen=True)
class RunState:
    """The part of a checkpoint that is not arrays.

    Attributes:
      step: Number of steps done.
      settings: Settings that must not change when the run resumes, by name.
      software: Versions that may change, which then changes the last bits of results.
      best: Step and value of the best step so far; empty if none is tracked.
    """

    step: int
    settings: Mapping[str, Any]
    software: Mapping[str, Any] = field(default_factory=dict)
    best: Mapping[str, Any] = field(default_factory=dict)

    def check_settings(self, settings: Mapping[str, Any], source: Path) -> None:
        """Raises ConfigError, which names the first setting, unless a run resumes with the settings it began with.

        Raises CheckpointError if only one of two versions of jaxis has a setting.
        """
        of_data = ("data.train.datasets", "the contents of")
        of_version = sorted(name for name in self.settings.keys() ^ settings.keys() if not name.startswith(of_data))
        if of_version:
            raise CheckpointError(
                f"{source} is of a version of jaxis with{'' if of_version[0] in self.settings else 'out'} "
                f"{of_version[0]}: go on with that version, or train into another training.output_dir"
            )
        for name in sorted({*self.settings, *settings}, key=lambda name: (" " in name, name)):  # fields first
            before, now = self.settings.get(name), settings.get(name)
            if before != now:
                raise ConfigError(
                    f"{source} was made with {name}={before!r}, and this run has {now!r}: set it back, or train into "
                    "another training.output_dir"
                )


def checkpoint_folder(output: Path, step: int) -> Path:
    return output / f"checkpoint-{step}"


def find_checkpoints(output: Path) -> list[tuple[int, Path]]:
    """Returns the complete checkpoints of a run as (step, folder), in order of steps."""
    if not output.is_dir():
        return []
    found = [
        (int(match[1]), path) for path in output.iterdir() if (match := _NAME.fullmatch(path.name)) and path.is_dir()
    ]
    return sorted(found)


def save_checkpoint(output: Path, state: RunState, arrays: Mapping[str, np.ndarray], keep: int | None) -> Path:
    """Writes a checkpoint and returns its folder; removes the oldest beyond `keep`, except that of the best step.

    With None as `keep`, all are kept. Raises CheckpointError if the checkpoint cannot be written, for example on a full
    disk; earlier ones are unchanged.
    """
    folder = checkpoint_folder(output, state.step)
    with written_beside(folder) as partial:
        write_tensors(partial / _ARRAYS, arrays)
        (partial / _STATE).write_text(json.dumps(asdict(state), indent=2) + "\n", encoding="utf-8")
    if keep is not None:
        for step, old in find_checkpoints(output)[:-keep]:
            if step == state.best.get("step"):
                continue
            # Renamed first: a run that is killed here must not leave half of a checkpoint under its name.
            doomed = old.with_name(f".{old.name}.removed")
            shutil.rmtree(doomed, ignore_errors=True)
            old.rename(doomed)
            shutil.rmtree(doomed, ignore_errors=True)
    return folder


def load_checkpoint(folder: Path) -> tuple[RunState, dict[str, np.ndarray]]:
    """Reads a checkpoint. Raises CheckpointError if there is no checkpoint, or it is damaged."""
    if not (folder / _STATE).is_file():
        raise CheckpointError(
            f"{folder} is no checkpoint of a training run: give a folder such as output/checkpoint-500"
        )
    values = read_json_object(folder / _STATE, max_bytes=_MAX_STATE_BYTES)
    try:
        state = RunState(**values)
    except TypeError as error:
        raise CheckpointError(f"{folder / _STATE} is of another version of jaxis: {error}") from None
    with SafetensorsFile(folder / _ARRAYS) as file:
        return state, {name: np.array(file.tensor(name)) for name in file.names}


class written_beside:
    """A context that fills a temporary folder and renames it to `folder` if the block ends without an error.

    Raises CheckpointError if a file cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder.absolute()
        self._partial = self._folder.with_name(f".{folder.name}.partial")

    def __enter__(self) -> Path:
        try:
            self._folder.parent.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(self._partial, ignore_errors=True)
            self._partial.mkdir()
        except OSError as error:
            raise self._fault(error) from None
        return self._partial

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if error is not None:
            shutil.rmtree(self._partial, ignore_errors=True)
            if isinstance(error, OSError):
                raise self._fault(error) from None
            return
        try:
            for path in self._partial.rglob("*"):
                sync(path)
            sync(self._partial)
            if self._folder.exists():
                shutil.rmtree(self._folder)
            self._partial.rename(self._folder)
            sync(self._folder.parent)
        except OSError as fault:
            shutil.rmtree(self._partial, ignore_errors=True)
            raise self._fault(fault) from None

    def _fault(self, error: OSError) -> CheckpointError:
        return CheckpointError(f"{self._folder} cannot be written: {error.strerror or error}; free space, and go on")


def sync(path: Path) -> None:
    """Waits until a file, or a folder's list of files, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
