"""Facts about the processor."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path


def usable_cores() -> int:
    """The number of cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_model() -> str:
    """The processor's name."""
    if sys.platform == "darwin":
        command = ["sysctl", "-n", "machdep.cpu.brand_string"]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    for key in ("model name", "Model", "Hardware"):
        if key in (info := _cpuinfo()):
            return info[key]
    return platform.processor() or platform.machine()


def cpu_flags() -> list[str]:
    """The processor's feature flags, sorted."""
    info = _cpuinfo()
    return sorted(info.get("flags", info.get("Features", "")).split())


def _cpuinfo() -> dict[str, str]:
    """The first processor of /proc/cpuinfo; empty if there is no such file."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return {}
    pairs = (line.split(":", 1) for line in text.split("\n\n")[0].splitlines() if ":" in line)
    return {key.strip(): value.strip() for key, value in pairs}
