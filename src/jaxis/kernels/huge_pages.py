"""Memory for weights on CPU, in huge pages if the system supports them: these are read up to twice as fast.

With ordinary pages of 4 KiB, a core that streams weights waits for address translations.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import threading

import numpy as np

HUGE_PAGE_BYTES = 2 << 20
# Reserved at a time. Pages take up memory only once they are written to. The rest of a chunk that is too small for the
# next weight thus takes none, except for the rest of a huge page: with large chunks that is rare.
CHUNK_BYTES = 256 * HUGE_PAGE_BYTES
ALIGNMENT_BYTES = 4096


class _Chunks:
    """Allocator of memory from large chunks. A chunk returns to the system when no array refers to it any more."""

    def __init__(self) -> None:
        self._chunk = np.empty(0, np.uint8)
        self._lock = threading.Lock()

    def take(self, num_bytes: int) -> np.ndarray:
        padded = -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        with self._lock:
            if padded > self._chunk.size:
                self._chunk = _map(max(padded, CHUNK_BYTES))
            taken, self._chunk = self._chunk[:num_bytes], self._chunk[padded:]
        return taken

    def begin(self) -> None:
        with self._lock:
            self._chunk = np.empty(0, np.uint8)


_chunks = _Chunks()


def begin_pages() -> None:
    """Begins a new chunk, so that later allocations can return to the system independently of earlier ones."""
    _chunks.begin()


def empty_pages(shape: tuple[int, ...]) -> np.ndarray:
    """Returns an uninitialised, page-aligned uint8 array of this shape."""
    return _chunks.take(math.prod(shape)).reshape(shape)


def _map(num_bytes: int) -> np.ndarray:
    mapped = mmap.mmap(-1, num_bytes + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        # The system may have been built without huge pages.
        with contextlib.suppress(OSError):
            mapped.madvise(mmap.MADV_HUGEPAGE)
    array = np.frombuffer(mapped, np.uint8)
    start = -array.ctypes.data % HUGE_PAGE_BYTES
    return array[start : start + num_bytes]
