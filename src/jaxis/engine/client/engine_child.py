"""One process with an engine in it, and the socket to it."""

from __future__ import annotations

import contextlib
import socket
import subprocess
from collections.abc import Callable
from typing import Any

from jaxis.engine.client import wire
from jaxis.engine.client.worker_start import take_worker
from jaxis.errors import EngineError
from jaxis.host.channel import MessageReader

RECEIVE_BYTES = 1 << 16  # a larger buffer is mapped anew by every call
_EXIT_SECONDS = 1.0  # from the end of the connection to that of the process


class EngineChild:
    """A process that builds an engine and serves it; it runs `worker_main`.

    Attributes:
      connection: Socket to the process.
      reports: Reader of the process's messages.

    Args:
      settings: Line with the settings, which the process reads.
      waits: True if the process waits for `admit` before it reads its weights.
    """

    def __init__(self, settings: bytes, *, waits: bool = False) -> None:
        self._process, self.connection = take_worker()
        self.reports = MessageReader(wire.REPORTS)
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the process has ended, which `wait_until_ready` reports
            self._process.stdin.write(settings + b"\n")
            self._process.stdin.flush()
            if not waits:
                self._process.stdin.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_until_ready(self, admit: Callable[[int], None] = lambda _: None) -> Any:
        """Waits for the engine, which may take minutes; returns the facts about it.

        Args:
          admit: Callback with the bytes of memory that the engine will take, before it reads its weights.

        Raises:
          JaxisError: An error of building the engine.
          EngineError: The process ended before the engine was built.
        """
        while data := self.connection.recv(RECEIVE_BYTES):
            for report in list(self.reports.feed(data)):  # all of them: the next `feed` must not begin with an old one
                if isinstance(report, wire.EngineFailed):
                    raise report.error()
                if isinstance(report, wire.LoadPlanned):
                    admit(report.num_bytes)
                    self._go_on()
                if isinstance(report, wire.EngineReady):
                    return report.info
        raise EngineError(f"the engine process ended during start-up: {self.end()}")

    def _go_on(self) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(b"\n")
            self._process.stdin.close()

    def end(self) -> str:
        """Ends the process, which has closed its connection or failed; returns its exit code or signal as text."""
        try:
            code = self._process.wait(_EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
            return "it closed its connection"
        if code == -9:
            return "signal 9, as the system sends when memory runs out"
        return f"signal {-code}" if code < 0 else f"exit code {code}"

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def stop(self, timeout_seconds: float) -> bool:
        """Tells the process to end; returns whether it ended by itself in time."""
        with contextlib.suppress(OSError):  # it may have ended
            self.connection.shutdown(socket.SHUT_WR)
        try:
            self._process.wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            self.kill()
            return False
        return True
