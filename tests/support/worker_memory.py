"""Keeps a worker of pytest small, and says how large it became.

JAX keeps every program that it has traced and compiled: over some thousand tests, gigabytes that no later test uses.
Where much has come together after a test, it is dropped; what is needed again is compiled again, or read from the disk.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import sys
from pathlib import Path

import pytest

from tests.support.distribution import unit

# In bytes: after the last test of a file, whose programs no other needs, and within one, whose next test would compile
# them again.
DROP_AFTER_A_FILE = 1_100_000_000
DROP_WITHIN_A_FILE = 1_600_000_000
DROP_AGAIN_AFTER = 250_000_000  # more than was left the last time
NUM_SHOWN = 10


class WorkerMemory:
    """The plugin, in each worker and in the process that starts them."""

    def __init__(self) -> None:
        self.peaks: dict[str, int] = {}  # a worker's, in bytes
        self.files: list[tuple[int, int, str]] = []  # a file's peak, how much more there was after it, its name
        self.before = resident()
        self.peak = 0
        self.left = 0  # in bytes, when programs were dropped the last time

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_teardown(self, item: pytest.Item, nextitem: pytest.Item | None) -> None:
        """After the test's fixtures are closed, and with its file's last test the file's."""
        self.peak = max(self.peak, peak_since_reset())
        is_last = nextitem is None or unit(nextitem.nodeid) != unit(item.nodeid)
        if resident() > max(DROP_AFTER_A_FILE if is_last else DROP_WITHIN_A_FILE, self.left + DROP_AGAIN_AFTER):
            drop_compiled_programs()
            self.left = resident()
        if nextitem is None or nextitem.path != item.path:
            after = resident()
            self.files.append((self.peak, after - self.before, item.nodeid.partition("::")[0]))
            self.before, self.peak = after, 0
            reset_peak()

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        files = sorted(self.files, reverse=True)[:NUM_SHOWN]
        if (output := getattr(session.config, "workeroutput", None)) is not None:
            output["memory"] = files
        elif files and not self.peaks:  # no workers
            self.peaks["this process"] = files[0][0]

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: object) -> None:
        """In the process that started the workers, when one has ended."""
        files = [tuple(row) for row in getattr(node, "workeroutput", {}).get("memory", [])]
        self.files.extend(files)
        if files:
            self.peaks[node.gateway.id] = max(peak for peak, *_ in files)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if not self.peaks:
            return
        peaks = ", ".join(f"{name} {peak / 1e9:.2f} GB" for name, peak in sorted(self.peaks.items()))
        terminalreporter.write_sep("=", f"peak memory: {peaks}")
        for peak, more, file in sorted(self.files, reverse=True)[:NUM_SHOWN]:
            terminalreporter.write_line(f"{peak / 1e6:6.0f} MB, {more / 1e6:+5.0f} MB after it  {file}")


def drop_compiled_programs() -> None:
    """Drops what JAX has traced and compiled, unless something else holds it, and gives free memory to the system."""
    gc.collect()
    if "jax" in sys.modules:
        sys.modules["jax"].clear_caches()
    gc.collect()
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)


def resident() -> int:
    """Bytes of this process in memory; 0 where the system does not say."""
    return _status("VmRSS:")


def peak_since_reset() -> int:
    """The most bytes that were in memory at once, since `reset_peak`."""
    return _status("VmHWM:")


def reset_peak() -> None:
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def _status(key: str) -> int:
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(key)), 0)
