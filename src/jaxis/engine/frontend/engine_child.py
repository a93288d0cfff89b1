"""One process with an engine in it, and the socket to it."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys

from jaxis.engine.frontend import wire
from jaxis.engine.frontend.engine_client import EngineInfo
from jaxis.errors import EngineError
from jaxis.host.frames import FrameReader

RECEIVE_BYTES = 1 << 16  # a larger buffer is mapped anew by every call
SOCKET_BUFFER_BYTES = 4 << 20
_EXIT_SECONDS = 1.0  # from the end of the connection to that of the process


class EngineChild:
    """Starts a process that builds an engine and serves it; see `engine_worker`.

    Attributes:
      connection: To the process.
      frames: Splits what it sends.

    Args:
      settings: The line that `engine_worker` reads.
    """

    def __init__(self, settings: bytes) -> None:
        self.connection, theirs = socket.socketpair()
        self.frames = FrameReader()
        for end in (self.connection, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER_BYTES)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "jaxis.engine.frontend.engine_worker", str(theirs.fileno())],
                stdin=subprocess.PIPE,
                pass_fds=[theirs.fileno()],
            )
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended, which `wait_until_ready` tells
            self._process.stdin.write(settings + b"\n")
            self._process.stdin.close()

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def wait_until_ready(self) -> EngineInfo:
        """Waits for the engine, which may take minutes.

        Raises:
          JaxisError: What building the engine raised.
          EngineError: The process ended before the engine was built.
        """
        while data := self.connection.recv(RECEIVE_BYTES):
            for frame in self.frames.feed(data):
                report = wire.decode_report(frame)
                if isinstance(report, wire.EngineFailed):
                    raise report.error()
                if isinstance(report, wire.EngineReady):
                    return report.info
        raise EngineError(f"the engine process ended during start-up: {self.end()}")

    def end(self) -> str:
        """Ends the process, which has closed its connection or failed; returns how it ended."""
        try:
            code = self._process.wait(_EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
            return "it closed its connection"
        if code == -9:
            return "signal 9, as the system sends when memory runs out"
        return f"signal {-code}" if code < 0 else f"exit code {code}"

    def kill(self) -> None:
        """Ends the process at once."""
        self._process.kill()
        self._process.wait()

    def stop(self, timeout_seconds: float) -> bool:
        """Tells the process to end; returns whether it did by itself in time."""
        with contextlib.suppress(OSError):  # it may have ended
            self.connection.shutdown(socket.SHUT_WR)
        try:
            self._process.wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            self.kill()
            return False
        return True
