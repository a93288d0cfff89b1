"""An engine in a process of its own, so that formatting and sending answers takes nothing from its steps.

Python runs one thread of a process at a time: beside an event loop with hundreds of streams, an engine's thread waits
for its turn longer than a step takes. A fault that kills the engine's process leaves the server alive to say so.
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
from jaxis.engine.frontend.engine_thread import Delivery, EngineStats, Outbox, Submission
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


class EngineProcess:
    """Starts an engine's process, and passes on what goes in and comes out.

    Attributes:
      tokenizer, default_sampling_params, max_model_len, max_num_seqs, model_type: The engine's.
      num_cache_tokens: Tokens that the KV cache holds.
      grammar_compiler: Checks forms here; the engine's process compiles them once more for itself.

    Args:
      arguments: Of `EngineArgs`.
      stall_seconds: How long a step may take; see `EngineThread.is_making_progress`.
      log: How to write the log; None writes none.

    Raises:
      JaxisError: What building the engine raised.
      EngineError: The process ended before the engine was there.
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
            self._process.stdin.write(json.dumps(settings).encode() + b"\n")
            self._process.stdin.close()
            self._frames = wire.FrameReader()
            built = self._wait_until_built()
            self.tokenizer = Tokenizer.from_folder(Path(built.folder))
        except BaseException:
            self._process.kill()
            self._process.wait()
            raise
        self.default_sampling_params = wire.params_from_fields(built.default_sampling_params)
        self.max_model_len = built.max_model_len
        self.max_num_seqs = built.max_num_seqs
        self.num_cache_tokens = built.num_cache_tokens
        self.model_type = built.model_type
        self.grammar_compiler = GrammarCompiler(self.tokenizer, built.vocab_size, built.eos_token_ids)
        self._submissions: dict[str, Submission] = {}  # by their ids over there
        self._ids: dict[str, str] = {}  # from a request's id to that
        self._unsent = bytearray()
        self._alive = wire.Alive(True, EngineStats())
        self._alive_since = time.monotonic()
        self._has_ended = False

    def _wait_until_built(self) -> wire.Built:
        while data := self._connection.recv(RECEIVE_BYTES):
            for frame in self._frames.feed(data):
                report = wire.decode_report(frame)
                if isinstance(report, wire.Failed):
                    raise report.error()
                if isinstance(report, wire.Built):
                    return report
        raise EngineError(f"the engine's process ended while it was built: {self._end()}")

    def connect(
        self,
        loop: asyncio.AbstractEventLoop,
        deliver: Callable[[Outbox], None],
        fail: Callable[[BaseException], None],
    ) -> None:
        """Begins to pass on what the engine brings; everything below is for the loop's thread.

        Args:
          loop: Running.
          deliver: Called in the loop with what a step brought.
          fail: Called in the loop with the error that ended the engine.
        """
        self._loop = loop
        self._deliver = deliver
        self._fail = fail
        self._connection.setblocking(False)
        self._alive_since = time.monotonic()
        loop.add_reader(self._connection.fileno(), self._receive)

    @property
    def stats(self) -> EngineStats:
        """The engine as it was lately."""
        return self._alive.stats

    def add(self, submission: Submission) -> None:
        """Queues a request; its stream gets an error if it cannot be honoured."""
        request_id = submission.request_id
        while request_id in self._submissions:  # one that was aborted, and has not said its last word
            request_id += "+"
        self._submissions[request_id] = submission
        self._ids[submission.request_id] = request_id
        self._send(wire.add_command(submission, request_id))

    def abort(self, request_id: str) -> None:
        """Ends a request if it is unfinished; its stream gets its last output, with finish_reason "abort"."""
        if request_id in self._ids:
            self._send(wire.Abort(self._ids.pop(request_id)))

    def stop(self, timeout_seconds: float) -> bool:
        """Ends the process; returns whether it has ended by itself in time. May be called in another thread."""
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
        """Whether the process lives, was heard of lately, and says so; see `EngineThread.is_making_progress`."""
        if self._has_ended or time.monotonic() - self._alive_since > stall_seconds:
            return False
        return self._alive.is_making_progress

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
            return  # the process has ended, and the reader tells of it
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
        if isinstance(report, wire.Step):
            self._deliver([delivery for result in report.results if (delivery := self._delivery(result)) is not None])
        elif isinstance(report, wire.Alive):
            self._alive = report
            self._alive_since = time.monotonic()
        elif isinstance(report, wire.Failed):
            self._has_ended = True
            self._fail(report.error())

    def _delivery(self, result: wire.Delta | wire.Refused) -> Delivery | None:
        new = self._submissions.get(result.request_id)
        if new is None:
            return None
        if isinstance(result, wire.Refused) or result.finished:
            del self._submissions[result.request_id]
            if self._ids.get(new.request_id) == result.request_id:
                del self._ids[new.request_id]
        if isinstance(result, wire.Refused):
            return new.stream, wire.Failed(result.kind, result.message).error()
        return new.stream, wire.from_delta(result, new)

    def _end(self) -> str:
        """How the process ended."""
        self._has_ended = True
        try:
            code = self._process.wait(5.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return "it closed its connection"
        return f"signal {-code}" if code < 0 else f"exit code {code}"
