"""The number of threads that compute: one for each core that this process may have to itself."""

from __future__ import annotations

import os
from collections.abc import Iterator, Set
from pathlib import Path, PurePosixPath

VARIABLE = "NPROC"
"""Variable of XLA's number of threads, which are those of the native kernels too."""


def usable_cores() -> int:
    """Returns the number of threads that compute here: `NPROC`, or the cores that `count_cores` finds."""
    given = os.environ.get(VARIABLE, "")
    return int(given) if given.isdecimal() and int(given) else count_cores(_allowed())


def limit_threads() -> None:
    """Has XLA start a thread for each usable core. It would count processors, where `NPROC` is not set.

    It reads the variable when its client starts.
    """
    allowed = _allowed()
    if VARIABLE not in os.environ and (cores := count_cores(allowed)) < len(allowed):
        os.environ[VARIABLE] = str(cores)


def count_cores(allowed: Set[int], root: Path = Path("/")) -> int:
    """Counts the cores of the processors that this process may run on, as far as Linux says more of them.

    Threads meet after each kernel, so the slowest one's time is that of all. Two that share a core have half of it
    each, an efficiency core is slower, and beyond a container's quota all are stopped for a while.
    """
    cpus = root / "sys/devices/system/cpu"
    fast = allowed & (_listed(root / "sys/devices/cpu_core/cpus") or allowed) or allowed  # Intel's performance cores
    capacities = {cpu: int(_read(cpus / f"cpu{cpu}/cpu_capacity") or 0) for cpu in fast}  # Arm's
    fastest = max(capacities.values())
    cores = {
        _read(cpus / f"cpu{cpu}/topology/thread_siblings_list") or str(cpu)
        for cpu, capacity in capacities.items()
        if 2 * capacity >= fastest
    }
    # With half a processor more, another thread is worth its waits: measured with 1.1, 1.25 and 1.5 on two.
    return max(1, int(min([len(cores), *_quotas(root)]) + 0.5))


def _allowed() -> Set[int]:
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def _quotas(root: Path) -> Iterator[float]:
    """Yields the processors that this process' control groups, and those around them, may use at a time."""
    for line in (_read(root / "proc/self/cgroup") or "0::/").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        mount = root / "sys/fs/cgroup" / ("cpu" if controllers else "")
        # In a container, the path may be one outside of it: only the mounted root exists.
        for folder in (PurePosixPath(path), *PurePosixPath(path).parents):
            group = mount / str(folder).lstrip("/")
            if controllers:
                limit, period = (_read(group / f"cpu.cfs_{name}_us") for name in ("quota", "period"))
            else:
                limit, _, period = _read(group / "cpu.max").partition(" ")
            if limit.isdecimal() and period.isdecimal():
                yield int(limit) / int(period)


def _listed(path: Path) -> set[int]:
    """Reads processors in Linux's notation, such as 0-3,8."""
    ranges = (part.partition("-") for part in _read(path).split(",") if part)
    return {cpu for first, _, last in ranges for cpu in range(int(first), int(last or first) + 1)}


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
