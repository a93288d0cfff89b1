"""The most memory that this process has had."""

from __future__ import annotations

import sys
from pathlib import Path

import psutil


def peak_memory_bytes() -> int:
    """Peak resident memory of this process, mapped file pages included."""
    if sys.platform == "linux":
        # getrusage would include what the parent held when it started this process.
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    if sys.platform == "win32":
        return psutil.Process().memory_info().peak_wset
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # bytes on macOS, KiB elsewhere
