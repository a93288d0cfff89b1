"""Processes that stand for hosts: started with a few CPU devices each, and ended whatever happens."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

START_SECONDS = 120.0
# Seconds within which a collective must complete, between processes that share two busy cores.
_COLLECTIVES = "--xla_cpu_collective_call_terminate_timeout_seconds=300 --xla_cpu_collective_timeout_seconds=60"


def free_port() -> int:
    """A port that nothing listens on now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


class HostProcess:
    """A Python process with its own CPU devices, whose output goes to a file.

    Args:
      arguments: Words after `python`.
      num_devices: CPU devices that JAX has in it.
      env: More variables.
    """

    def __init__(self, arguments: Sequence[str], *, num_devices: int = 1, **env: str) -> None:
        self._file = tempfile.NamedTemporaryFile(prefix="host", suffix=".log")  # noqa: SIM115 (lives as long as this)
        flags = f"{os.environ.get('XLA_FLAGS', '')} {_COLLECTIVES} --xla_cpu_multi_thread_eigen=false"
        self.process = subprocess.Popen(
            [sys.executable, *arguments],
            stdout=self._file,
            stderr=subprocess.STDOUT,
            env=os.environ | {"JAX_NUM_CPU_DEVICES": str(num_devices), "XLA_FLAGS": flags} | env,
        )

    @property
    def output(self) -> str:
        """Text that it has printed so far."""
        return Path(self._file.name).read_text("utf-8", errors="replace")

    def wait(self, seconds: float = START_SECONDS) -> int:
        """Its exit code, once it has ended.

        Raises:
          AssertionError: It has not ended in time.
        """
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still runs after {seconds:g} s:\n{self.output}") from None

    def wait_for(self, text: str, seconds: float = START_SECONDS) -> None:
        """Waits until it has printed a string.

        Raises:
          AssertionError: It has ended without, or the time is over.
        """
        deadline = time.monotonic() + seconds
        while text not in self.output:
            assert self.process.poll() is None, f"ended without {text!r}:\n{self.output}"
            assert time.monotonic() < deadline, f"no {text!r} after {seconds:g} s:\n{self.output}"
            time.sleep(0.02)

    def end(self) -> None:
        """Kills it if it still runs."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


@contextmanager
def host_processes(
    commands: Sequence[Sequence[str]], *, num_devices: int = 1, **env: str
) -> Iterator[list[HostProcess]]:
    """Starts a process for each command; see `HostProcess`."""
    hosts: list[HostProcess] = []
    try:
        hosts += [HostProcess(command, num_devices=num_devices, **env) for command in commands]
        yield hosts
    finally:
        for host in hosts:
            host.end()


def run_in_processes(module: str, function: str, num_processes: int = 2, *, num_devices: int = 2) -> list[str]:
    """Runs a function of a module with a command line (NAME RANK PORT) in several processes; what each printed."""
    port = str(free_port())
    commands = [["-m", module, function, str(rank), port] for rank in range(num_processes)]
    with host_processes(commands, num_devices=num_devices) as hosts:
        codes = [host.wait() for host in hosts]
        assert not any(codes), "\n".join(f"exit code {c}:\n{host.output}" for c, host in zip(codes, hosts, strict=True))
        return [host.output for host in hosts]
