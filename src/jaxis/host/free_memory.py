"""Gives memory back to the machine."""

from __future__ import annotations

import ctypes
import gc
import sys


def return_free_memory() -> None:
    """Returns what this process no longer needs to the machine, which takes milliseconds.

    Errors hold the frames that they passed through, in cycles that only the collector frees.

    The allocator keeps freed memory for later: after an input of megabytes, of which a tokenizer makes hundreds, that
    is most of a server's memory. Does nothing where the allocator is not glibc's.
    """
    gc.collect()
    if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)
