from __future__ import annotations

import mmap

import numpy as np
from numpy.lib.array_utils import byte_bounds

# Linux maps at most as much of a file at a page fault, unless it is configured otherwise.
_FAULT_AROUND_BYTES = 64 << 10


def drop_pages(mapped: mmap.mmap, start: int, end: int) -> None:
    """Lets the operating system drop the pages of bytes `start` to `end` of a mapped file from this process.

    Reading them again reads the file again. Does nothing where the system cannot be told.
    """
    if start == end or not hasattr(mmap, "MADV_DONTNEED"):
        return
    # Outwards, because a page fault also maps what is around the page. Of a neighbour that is still to be read this
    # drops a few pages, which costs a page fault or two.
    first = max(0, start - _FAULT_AROUND_BYTES) // mmap.PAGESIZE * mmap.PAGESIZE
    mapped.madvise(mmap.MADV_DONTNEED, first, min(end + _FAULT_AROUND_BYTES, len(mapped)) - first)


def drop_pages_of(array: np.ndarray) -> None:
    """Calls `drop_pages` for an array that views a mapped file or a part of one; does nothing for others."""
    if (place := _place(array)) is not None:
        drop_pages(*place)


def is_mapped(array: np.ndarray) -> bool:
    """Returns whether an array views a mapped file or a part of one."""
    return _place(array) is not None


def read_at_random(array: np.ndarray) -> None:
    """Lets the operating system read no more of a mapped file than is asked for, where an array views it."""
    place = _place(array)
    if place is not None and hasattr(mmap, "MADV_RANDOM"):
        mapped, start, end = place
        first = start // mmap.PAGESIZE * mmap.PAGESIZE
        mapped.madvise(mmap.MADV_RANDOM, first, end - first)


def _place(array: np.ndarray) -> tuple[mmap.mmap, int, int] | None:
    """Returns the map that an array views and the range of its bytes there; None for an array of other memory."""
    base: object = array
    while isinstance(base, np.ndarray):
        base = base.base
    if not isinstance(base, mmap.mmap) or not array.size:
        return None
    first, end = byte_bounds(array)
    start_of_map = np.frombuffer(base, np.uint8, count=1).ctypes.data
    return base, first - start_of_map, end - start_of_map
