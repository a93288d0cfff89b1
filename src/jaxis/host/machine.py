"""The machine that this process runs on: its processor, its memory; the age of the process, and the
processor time of its threads."""

from __future__ import annotations

import ctypes
import gc
import os
import platform
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil


def cpu_model() -> str:
    if sys.platform == "darwin":
        command = ["sysctl", "-n", "machdep.cpu.brand_string"]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    for key in ("model name", "Model", "Hardware"):
        if key in (info := _cpuinfo()):
            return info[key]
    return platform.processor() or platform.machine()


def cpu_flags() -> list[str]:
    info = _cpuinfo()
    return sorted(info.get("flags", info.get("Features", "")).split())


def _cpuinfo() -> dict[str, str]:
    """Reads the first processor of /proc/cpuinfo; empty if there is no such file."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return {}
    pairs = (line.split(":", 1) for line in text.split("\n\n")[0].splitlines() if ":" in line)
    return {key.strip(): value.strip() for key, value in pairs}


def seconds_since_start() -> float:
    """Returns the seconds since this process was started, the interpreter's own start included."""
    if sys.platform == "linux":
        # psutil adds the boot time, which the system reports in whole seconds.
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.time() - psutil.Process().create_time()


def return_free_memory() -> None:
    """Returns unused memory of this process to the machine, which takes milliseconds.

    Errors hold the frames that they passed through, in cycles that only the collector frees.

    The allocator keeps freed memory for later: after an input of megabytes, of which a tokenizer makes hundreds, that
    is most of a server's memory. Only glibc's allocator gives it back.
    """
    gc.collect()
    if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)


def host_bytes() -> int:
    """Returns the main memory of this machine, or the limit of the container that this process runs in."""
    total = psutil.virtual_memory().total
    try:
        return min(total, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    except (OSError, ValueError):
        return total


def free_host_bytes() -> int:
    """Returns the main memory that this process could still take."""
    free = psutil.virtual_memory().available
    # A container's own limit, which the system-wide figure does not include. Pages of files that nobody has used for a
    # while, such as those of weights that were read, count as used there, and make way.
    group = Path("/sys/fs/cgroup")
    try:
        limit, used = (int((group / name).read_text()) for name in ("memory.max", "memory.current"))
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        return min(free, limit - used + int(stat.get("inactive_file", 0)))
    except (OSError, ValueError):
        return free


def peak_memory_bytes() -> int:
    """Returns the peak resident memory of this process, mapped file pages included."""
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


NICENESS = 5


def yield_to_others() -> None:
    """Lowers the priority of the calling thread, and of the threads and processes that it will start.

    They still get all the processor time that no other thread wants, and about a quarter of a processor where others
    want all of it. Does nothing outside Linux, where a thread has no priority of its own.
    """
    if sys.platform == "linux":
        thread = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread, max(NICENESS, os.getpriority(os.PRIO_PROCESS, thread)))
