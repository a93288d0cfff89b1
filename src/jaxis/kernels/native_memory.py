"""Memory for weights on CPU: in huge pages where the system has them.

With ordinary pages of 4 KiB a core that streams weights waits for address translations; in huge pages the same
memory is read up to twice as fast.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import threading

import numpy as np

HUGE_PAGE_BYTES = 2 << 20
# Taken from the system at a time. What is not used of it yet is not in memory yet.
CHUNK_BYTES = 32 * HUGE_PAGE_BYTES
ALIGNMENT_BYTES = 4096


class _Chunks:
    """Hands out pieces of large chunks. A chunk goes back to the system once no array refers to it any more."""

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


_chunks = _Chunks()


def empty(shape: tuple[int, ...]) -> np.ndarray:
    """uint8 of this shape, not initialised, page-aligned."""
    return _chunks.take(math.prod(shape)).reshape(shape)


def _map(num_bytes: int) -> np.ndarray:
    mapped = mmap.mmap(-1, num_bytes + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        # A system may have been built without them.
        with contextlib.suppress(OSError):
            mapped.madvise(mmap.MADV_HUGEPAGE)
    array = np.frombuffer(mapped, np.uint8)
    start = -array.ctypes.data % HUGE_PAGE_BYTES
    return array[start : start + num_bytes]
