"""Folders that are on the disk as a whole, or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from jaxis.errors import CheckpointError

# Written last: without them a folder is no model and no adapter.
_LAST = ("config.json", "adapter_config.json")


@contextmanager
def written_beside(folder: Path) -> Iterator[Path]:
    """A context that fills a temporary folder, which becomes `folder` if the block ends without an error.

    Raises CheckpointError if a file cannot be written.
    """
    with _synced(folder) as partial:
        yield partial
        for path in (*partial.rglob("*"), partial):
            _sync(path)
        if folder.exists():
            shutil.rmtree(folder)
        partial.rename(folder)


@contextmanager
def placed_into(output: Path) -> Iterator[Path]:
    """A context that fills a temporary folder, whose files are moved to `output` once all of them are on the disk.

    Raises CheckpointError if a file cannot be written.
    """
    output.mkdir(parents=True, exist_ok=True)
    with _synced(output / "final") as partial:
        yield partial
        for path in partial.rglob("*"):
            _sync(path)
        for path in sorted(partial.iterdir(), key=lambda path: path.name in _LAST):
            if path.is_dir():
                shutil.rmtree(output / path.name, ignore_errors=True)
            path.replace(output / path.name)


@contextmanager
def _synced(folder: Path) -> Iterator[Path]:
    """A context with a temporary folder beside `folder`, which is removed at its end."""
    partial = folder.absolute().with_name(f".{folder.name}.partial")
    try:
        partial.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        yield partial
        _sync(partial.parent)
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be written: {error.strerror or error}; free space, and go on") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _sync(path: Path) -> None:
    """Waits until a file, or a folder's list of files, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
