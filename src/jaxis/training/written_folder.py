"""Folders that are on the disk as a whole, or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from jaxis.errors import CheckpointError

_NUM_SYNCS = 32  # a disk writes the journal once for all files that are waited for
# Written last: without them a folder is no model and no adapter.
_LAST = ("config.json", "adapter_config.json")


@contextmanager
def written_beside(folder: Path) -> Iterator[Path]:
    """A context that fills a temporary folder, which becomes `folder` if the block ends without an error.

    Raises CheckpointError if a file cannot be written.
    """
    with _synced(folder) as partial:
        yield partial
        with ThreadPoolExecutor(_NUM_SYNCS) as pool:
            list(pool.map(_sync, (*partial.rglob("*"), partial)))
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
def writing_into(folder: Path) -> Iterator[Path]:
    """A context that writes into the temporary folder of another process's `written_beside`; raises the same error."""
    try:
        yield folder.absolute().with_name(f".{folder.name}.partial")
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be written: {error.strerror or error}; free space, and go on") from None


@contextmanager
def _synced(folder: Path) -> Iterator[Path]:
    """A context with a temporary folder beside `folder`, which is removed at its end."""
    with writing_into(folder) as partial:
        try:
            partial.parent.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
            yield partial
            _sync(partial.parent)
        finally:
            shutil.rmtree(partial, ignore_errors=True)


def _sync(path: Path) -> None:
    """Waits until a file, or a folder's list of files, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
