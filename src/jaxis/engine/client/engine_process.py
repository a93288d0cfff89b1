"""An engine in a process of its own, so that formatting and sending answers does not slow its steps.

Python runs one thread of a process at a time: next to an event loop with hundreds of streams, an engine's thread would
wait for the GIL longer than a step takes. If the engine's process ends, the server survives, reports it, and starts
another.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from jaxis.engine.arguments import EngineArgs
from jaxis.engine.client import wire
from jaxis.engine.client.async_engine import EngineCallbacks
from jaxis.engine.client.engine_child import RECEIVE_BYTES, EngineChild
from jaxis.engine.client.engine_client import GENERATION, EngineKind, EngineStats
from jaxis.engine.memory_budget import MemoryBudget
from jaxis.errors import EngineError, JaxisError
from jaxis.host.channel import to_frame
from jaxis.tokenizer.template_choice import read_tokenizer

if TYPE_CHECKING:
    import asyncio

MAX_RESTARTS = 3  # within RESTART_WINDOW_SECONDS
RESTART_WINDOW_SECONDS = 600.0
RESTART_DELAY_SECONDS = 2.0  # before the second restart in the window; twice that before the third, ...
_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LogSettings:
    """Settings of the log of the engine's process, as for `jaxis.host.logs.set_up_logs`."""

    as_json: bool
    level: int


class EngineProcess:
    """The `EngineClient` of an engine in a process, which it starts.

    If the process ends, or its engine fails for good, its requests are lost, and another process is started: at most
    `max_restarts` times within RESTART_WINDOW_SECONDS.

    Attributes:
      info, tokenizer: Facts about the engine, and its tokenizer.

    Args:
      arguments: Arguments of `EngineArgs`.
      kind: Kind of the engine.
      stall_seconds: Longest time of a step, as in `EngineThread.is_making_progress`.
      log: Settings of the log; None writes none.
      max_restarts: Most restarts; None is MAX_RESTARTS, 0 leaves restarts to another program.
      shared: Budget of host memory that other engines share; None is all that is free.
      admit: Callback, used with `shared`, with the bytes of memory that the engine will take, before it reads its
        weights. It may wait for memory, and may raise. A restarted engine takes the same memory without a call.
      meanwhile: Function that is called while the process builds the engine.

    Raises:
      JaxisError: An error of building the engine.
      EngineError: The process ended before the engine was built.
    """

    def __init__(
        self,
        arguments: Mapping[str, Any],
        kind: EngineKind = GENERATION,
        *,
        stall_seconds: float,
        log: LogSettings | None = None,
        max_restarts: int | None = None,
        shared: MemoryBudget | None = None,
        admit: Callable[[int], None] = lambda _: None,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> None:
        settings = {
            "module": kind.module,
            "engine": {name: os.fspath(v) if isinstance(v, os.PathLike) else v for name, v in arguments.items()},
            "stall_seconds": stall_seconds,
            "log": log and dataclasses.asdict(log),
            "shared": shared and dataclasses.asdict(shared),
        }
        self._waits = shared is not None
        self._max_restarts = MAX_RESTARTS if max_restarts is None else max_restarts
        self._settings = json.dumps(settings).encode()
        self._child = self._start_child()
        try:
            meanwhile()
            self.info = msgspec.convert(self._child.wait_until_ready(admit), kind.info)
            args = EngineArgs(**arguments)
            self.tokenizer = read_tokenizer(Path(self.info.model_folder), args.chat_template, args.template_folder)
        except BaseException:
            self._child.kill()
            raise
        self._unsent = bytearray()
        self._begin()
        self._stopping = threading.Event()
        self._child_lock = threading.Lock()  # no child is started once `_stopping` is set
        self._restart_times: list[float] = []
        self._losses: queue.SimpleQueue[tuple[float, float] | None] = queue.SimpleQueue()  # see `_start_again`
        # Started here, because a thread inherits its creator's priority, and the event loop's may be low.
        threading.Thread(target=self._start_when_lost, name="jaxis-restart", daemon=True).start()

    def connect(self, loop: asyncio.AbstractEventLoop, callbacks: EngineCallbacks) -> None:
        self._loop = loop
        self._callbacks = callbacks
        self._listen()

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def stats(self) -> EngineStats:
        """The engine at the last heartbeat."""
        return self._heartbeat.stats

    def send(self, command: msgspec.Struct) -> None:
        """Sends a command. It is dropped if the process is not up: its requests have failed, or will."""
        if not self._is_up or self._stopping.is_set():
            return
        was_empty = not self._unsent
        self._unsent += to_frame(command)
        if was_empty:
            self._send_rest()

    def stop(self, timeout_seconds: float) -> bool:
        """Ends the process; returns whether it exited by itself in time. May be called from another thread."""
        with self._child_lock:
            self._stopping.set()
        self._losses.put(None)
        return self._child.stop(timeout_seconds)

    def is_making_progress(self, stall_seconds: float) -> bool:
        """Returns whether the process is alive, has recently sent a heartbeat, and reports progress."""
        if not self._is_up or time.monotonic() - self._heartbeat_time > stall_seconds:
            return False
        return self._heartbeat.is_making_progress

    def _start_child(self) -> EngineChild:
        return EngineChild(self._settings, waits=self._waits)

    def _begin(self) -> None:
        self._heartbeat, self._heartbeat_time, self._is_up = wire.Heartbeat(True, EngineStats()), time.monotonic(), True

    def _listen(self) -> None:
        self._child.connection.setblocking(False)
        self._begin()
        self._loop.add_reader(self._child.connection.fileno(), self._receive)

    def _send_rest(self) -> None:
        try:
            num_sent = self._child.connection.send(self._unsent)
        except BlockingIOError:
            num_sent = 0
        except OSError:
            return  # the process has ended, which the reader reports
        del self._unsent[:num_sent]
        if self._unsent:
            self._loop.add_writer(self._child.connection.fileno(), self._send_rest)
        else:
            self._loop.remove_writer(self._child.connection.fileno())

    def _receive(self) -> None:
        try:
            data = self._child.connection.recv(RECEIVE_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._hang_up()
            if self._stopping.is_set():
                self._child.connection.close()
            else:
                self._restart(f"its process ended ({self._child.end()})")
            return
        for report in self._child.reports.feed(data):
            if self._is_up:
                self._take(report)

    def _take(self, report: Any) -> None:
        if isinstance(report, wire.Heartbeat):
            self._heartbeat = report
            self._heartbeat_time = time.monotonic()
        elif isinstance(report, wire.EngineFailed):
            self._hang_up()
            self._child.kill()
            self._restart(f"it failed ({report.error()})")
        else:
            self._callbacks.deliver(report)

    def _hang_up(self) -> None:
        self._is_up = False
        self._unsent.clear()
        self._loop.remove_reader(self._child.connection.fileno())
        self._loop.remove_writer(self._child.connection.fileno())

    def _restart(self, reason: str) -> None:
        """Reports that the requests are lost, and starts another process, unless that has happened too often."""
        now = time.monotonic()
        self._restart_times = [time for time in self._restart_times if now - time < RESTART_WINDOW_SECONDS]
        number = len(self._restart_times) + 1
        if number > self._max_restarts:
            if self._max_restarts:
                reason = f"{reason}, after {self._max_restarts} restarts"
            _logger.critical("the engine is lost: %s: giving up", reason)
            self._callbacks.fail(EngineError(reason))
            return
        _logger.error("the engine is lost: %s; starting it again (%d of %d)", reason, number, self._max_restarts)
        self._restart_times.append(now)
        self._callbacks.interrupt(EngineError(f"the engine is lost: {reason}"))
        self._losses.put((now, (number - 1) * RESTART_DELAY_SECONDS))

    def _start_when_lost(self) -> None:
        while (loss := self._losses.get()) is not None:
            self._start_again(*loss)

    def _start_again(self, lost_time: float, delay_seconds: float) -> None:
        self._stopping.wait(delay_seconds)
        with self._child_lock:
            if self._stopping.is_set():
                return
            self._child.connection.close()
            self._child = self._start_child()
        try:
            self._child.wait_until_ready()
        except (JaxisError, OSError) as error:
            self._child.kill()
            self._call_in_loop(self._restart, f"it cannot be started again ({error})")
        else:
            self._call_in_loop(self._resume, lost_time)

    def _call_in_loop(self, function: Callable[[Any], None], argument: Any) -> None:
        if not self._stopping.is_set():
            self._loop.call_soon_threadsafe(function, argument)

    def _resume(self, lost_time: float) -> None:
        _logger.info("the engine runs again, %.1f s after it was lost", time.monotonic() - lost_time)
        self._listen()
        self._callbacks.resume()
