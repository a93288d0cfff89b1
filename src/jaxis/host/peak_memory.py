"""The most memory that this process has had."""

from __future__ import annotations

import sys

import psutil


def peak_memory_bytes() -> int:
    """The largest resident size of the process so far, in bytes."""
    if sys.platform == "win32":
        return psutil.Process().memory_info().peak_wset
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
