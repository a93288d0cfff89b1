"""Garbage collection around what makes many objects that stay."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def nothing_collected() -> Iterator[None]:
    """Pauses collections in the block, such as of imports, and counts its objects as old ones."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        age_objects()
        if collects:
            gc.enable()


def age_objects() -> None:
    """Counts all objects as old, without looking at them: only full collections, which are rare, do so."""
    if gc.get_freeze_count() == 0:  # others stay frozen
        gc.freeze()
        gc.unfreeze()
