"""The folders of the pack cache: their list, and their removal. Imports no JAX."""

from __future__ import annotations

import fcntl
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

from jaxis.host.cache_folder import cache_folder
from jaxis.loading.hub_cache import CachedModel
from jaxis.loading.packed_name import PACKED

MODEL = "model.json"


def packed_models() -> list[CachedModel]:
    """Returns what the cache has, the least recently used first."""
    found = []
    for path in root().glob("[!.]*"):
        with suppress(OSError, ValueError):  # another process may have just removed it
            name, used = json.loads((path / MODEL).read_text()), path.stat().st_mtime
            size = (path / PACKED).stat().st_size
            found.append(CachedModel(name, path.name, ("packed",), size, 1, path, datetime.fromtimestamp(used, UTC)))
    return sorted(found, key=lambda each: each.last_used)


def empty_pack_cache() -> int:
    """Deletes all packed folders of the cache; returns the freed bytes. Processes that mapped one keep its memory."""
    freed = sum(model.nbytes for model in packed_models())
    with suppress(FileNotFoundError), writing_alone():
        evict(0)
    return freed


def root() -> Path:
    return cache_folder() / "packed"


@contextmanager
def writing_alone() -> Iterator[bool]:
    """Yields whether no other process writes to the cache, whose unfinished folders are then deleted."""
    with (root() / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        for left in root().glob(".*-*"):
            remove(left)
        yield True


def evict(max_bytes: int) -> None:
    """Deletes the least recently used folders until the others have at most so many bytes."""
    models = packed_models()
    held = sum(model.nbytes for model in models)
    for model in models:
        if held > max_bytes:
            remove(model.path)
            held -= model.nbytes


def remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
