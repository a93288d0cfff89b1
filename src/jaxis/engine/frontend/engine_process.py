"""Runs an engine in a separate process, so that formatting and sending answers does not slow its steps.

Python runs one thread of a process at a time: next to an event loop with hundreds of streams, an engine's thread would
wait for the GIL longer than a step takes. If the engine process crashes, the server survives to report it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxis.engine.frontend import wire
from jaxis.engine.frontend.engine_client import EngineClient, EngineInfo, EngineOutputs, EngineStats, Submission
from jaxis.engine.grammar.compiler import GrammarCompiler
from jaxis.errors import EngineError
from jaxis.tokenizer import Tokenizer

if TYPE_CHECKING:
    import asyncio

RECEIVE_BYTES = 1 << 20
SOCKET_BUFFER_BYTES = 4 << 20


@dataclass(frozen=True)
class LogSettings:
    """How the engine's process writes its log; see `jaxis.host.logs.set_up_logs`."""

    as_json: bool
    level: int


class EngineProcess(EngineClient):
    """Starts an engine process, and is an `EngineClient` of it.

    Attributes:
      info, tokenizer: The engine's.
      grammar_compiler: Checks grammars here; the engine's process compiles them again for itself.

    Args:
      arguments: Those of `EngineArgs`.
      stall_seconds: How long a step may take; see `EngineThread.is_making_progress`.
      log: How to write the log; None writes none.

    Raises:
      JaxisError: What building the engine raised.
      EngineError: The process ended before the engine was built.
    """

    def __init__(self, arguments: Mapping[str, Any], *, stall_seconds: float, log: LogSettings | None = None) -> None:
        self._connection, theirs = socket.socketpair()
        for end in (self._connection, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER_BYTES)
        settings = {
            "engine": {name: os.fspath(v) if isinstance(v, os.PathLike) else v for name, v in arguments.items()},
            "stall_seconds": stall_seconds,
            "log": log and dataclasses.asdict(log),
        }
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "jaxis.engine.frontend.engine_worker", str(theirs.fileno())],
                stdin=subprocess.PIPE,
                pass_fds=[theirs.fileno()],
            )
        try:
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps(settings).encode() + b"\n")
            self._process.stdin.close()
            self._frames = wire.FrameReader()
            self.info = self._wait_until_ready()
            self.tokenizer = Tokenizer.from_path(Path(self.info.model_folder))
        except BaseException:
            self._process.kill()
            self._process.wait()
            raise
        self.grammar_compiler = GrammarCompiler(self.tokenizer, self.info.vocab_size, self.info.eos_token_ids)
        self._unsent = bytearray()
        self._heartbeat = wire.Heartbeat(True, EngineStats())
        self._heartbeat_time = time.monotonic()
        self._has_ended = False

    def _wait_until_ready(self) -> EngineInfo:
        while data := self._connection.recv(RECEIVE_BYTES):
            for frame in self._frames.feed(data):
                report = wire.decode_report(frame)
                if isinstance(report, wire.EngineFailed):
                    raise report.error()
                if isinstance(report, wire.EngineReady):
                    return report.info
        raise EngineError(f"the engine process ended during start-up: {self._end()}")

    def connect(
        self,
        loop: asyncio.AbstractEventLoop,
        deliver: Callable[[EngineOutputs], None],
        fail: Callable[[BaseException], None],
    ) -> None:
        """See `EngineClient.connect`."""
        self._loop = loop
        self._deliver = deliver
        self._fail = fail
        self._connection.setblocking(False)
        self._heartbeat_time = time.monotonic()
        loop.add_reader(self._connection.fileno(), self._receive)

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    @property
    def stats(self) -> EngineStats:
        """The engine at the last heartbeat."""
        return self._heartbeat.stats

    def add(self, submission: Submission) -> None:
        """See `EngineClient.add`."""
        self._send(wire.AddRequest.of(submission))

    def abort(self, request_id: str) -> None:
        """See `EngineClient.abort`."""
        self._send(wire.AbortRequest(request_id))

    def stop(self, timeout_seconds: float) -> bool:
        """Ends the process; returns whether it exited by itself in time. May be called from another thread."""
        self._has_ended = True
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_WR)
        try:
            self._process.wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            return False
        return True

    def is_making_progress(self, stall_seconds: float) -> bool:
        """Whether the process is alive, has lately sent a heartbeat, and reports progress; see `EngineThread`."""
        if self._has_ended or time.monotonic() - self._heartbeat_time > stall_seconds:
            return False
        return self._heartbeat.is_making_progress

    def _send(self, command: wire.Command) -> None:
        if self._has_ended:
            return
        was_empty = not self._unsent
        self._unsent += wire.to_frame(command)
        if was_empty:
            self._send_rest()

    def _send_rest(self) -> None:
        try:
            num_sent = self._connection.send(self._unsent)
        except BlockingIOError:
            num_sent = 0
        except OSError:
            return  # the process has ended, which the reader reports
        del self._unsent[:num_sent]
        if self._unsent:
            self._loop.add_writer(self._connection.fileno(), self._send_rest)
        else:
            self._loop.remove_writer(self._connection.fileno())

    def _receive(self) -> None:
        try:
            data = self._connection.recv(RECEIVE_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._loop.remove_reader(self._connection.fileno())
            if not self._has_ended:
                self._fail(EngineError(f"its process ended: {self._end()}"))
            return
        for frame in self._frames.feed(data):
            self._take(wire.decode_report(frame))

    def _take(self, report: wire.Report) -> None:
        if isinstance(report, wire.StepOutputs):
            self._deliver(report.engine_outputs())
        elif isinstance(report, wire.Heartbeat):
            self._heartbeat = report
            self._heartbeat_time = time.monotonic()
        elif isinstance(report, wire.EngineFailed):
            self._has_ended = True
            self._fail(report.error())

    def _end(self) -> str:
        """How the process ended."""
        self._has_ended = True
        try:
            code = self._process.wait(5.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return "it closed its connection"
        return f"signal {-code}" if code < 0 else f"exit code {code}"
