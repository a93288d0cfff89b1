"""The engine's process: builds an engine, steps it in a thread, and carries out the server's commands.

`EngineProcess` starts it as `python -m jaxis.engine.frontend.engine_worker SOCKET`. The process ends when the server
closes its end of the socket.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import json
import logging
import os
import signal
import socket
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import psutil

from jaxis.engine.frontend import wire
from jaxis.engine.frontend.engine_change import UpdateWeights
from jaxis.engine.frontend.engine_client import EngineInfo, EngineOutputs
from jaxis.engine.frontend.engine_thread import EngineThread
from jaxis.errors import EngineError, JaxisError
from jaxis.host.channel import MessageReader, to_frame
from jaxis.host.threads import run_in_daemon

if TYPE_CHECKING:
    from jaxis.engine.arguments import EngineArgs
    from jaxis.engine.grammar.matcher import Grammar
    from jaxis.engine.memory_budget import MemoryBudget
    from jaxis.engine.setup import BuiltEngine
    from jaxis.host.progress import ProgressDisplay

RECEIVE_BYTES = 1 << 20
HEARTBEAT_SECONDS = 0.5
STOP_SECONDS = 10.0
_logger = logging.getLogger(__name__)


class Worker(ABC):
    """Passes messages between a socket and the thread of an engine of any kind.

    Args:
      connection: To the server's process.
      commands: Decodes what that sends.
      stall_seconds: How long a step may take.
    """

    def __init__(self, connection: socket.socket, commands: msgspec.msgpack.Decoder[Any], stall_seconds: float) -> None:
        self._connection, self._commands = connection, commands
        self._stall_seconds = stall_seconds
        self._send_lock = threading.Lock()
        self._ended = threading.Event()

    @abstractmethod
    def start(self) -> None:
        """Starts the engine's thread."""

    @abstractmethod
    def carry_out(self, command: Any) -> None:
        """Has the engine's thread do what the server's process says."""

    @abstractmethod
    def heartbeat(self) -> wire.Heartbeat:
        """How the engine is."""

    @abstractmethod
    def stop(self) -> None:
        """Ends the engine's thread."""

    def run(self) -> None:
        """Serves until the server closes its end of the connection."""
        self.start()
        threading.Thread(target=self._send_heartbeats, name="jaxis-heartbeat", daemon=True).start()
        commands = MessageReader(self._commands)
        while data := self._connection.recv(RECEIVE_BYTES):
            for command in commands.feed(data):
                self.carry_out(command)
        self._ended.set()
        self.stop()

    def send(self, report: msgspec.Struct) -> None:
        """Sends a report to the server's process."""
        try:
            with self._send_lock:
                self._connection.sendall(to_frame(report))
        except OSError:
            _logger.debug("the server's process has ended")

    def send_failure(self, error: BaseException) -> None:
        """Says that the engine has failed for good."""
        self.send(wire.EngineFailed.of(error))

    def _send_heartbeats(self) -> None:
        process = psutil.Process()
        while not self._ended.wait(HEARTBEAT_SECONDS):
            beat = self.heartbeat()
            stats = dataclasses.replace(beat.stats, process_memory_bytes=process.memory_info().rss)
            self.send(wire.Heartbeat(beat.is_making_progress, stats))


class EngineWorker(Worker):
    """Passes messages between a socket and an engine's thread.

    Args:
      built: The engine.
      connection: To the server's process.
      stall_seconds: How long a step may take; see `EngineThread.is_making_progress`.
    """

    def __init__(self, built: BuiltEngine, connection: socket.socket, stall_seconds: float) -> None:
        super().__init__(connection, wire.COMMANDS, stall_seconds)
        self._engine, self._hosts = built.engine, built.hosts
        self._thread = EngineThread(built, self._send_outputs, self.send_failure)
        built.hosts.when_lost(self._end_with_failure, stall_seconds)
        built.engine.grammar_compiler.prepare()
        # Requests whose grammar is being compiled, and which of those were aborted meanwhile.
        self._compiling: set[str] = set()
        self._aborted: set[str] = set()
        self._lock = threading.Lock()

    def start(self) -> None:
        """See `Worker.start`."""
        self._thread.start()

    def stop(self) -> None:
        """See `Worker.stop`."""
        if self._thread.stop(STOP_SECONDS):
            self._engine.connector.close()
        self._hosts.end()

    def carry_out(self, command: wire.Command) -> None:
        """See `Worker.carry_out`."""
        if isinstance(command, wire.AbortRequest):
            with self._lock:
                if command.request_id in self._compiling:
                    self._aborted.add(command.request_id)
                else:
                    self._thread.abort(command.request_id)
        elif isinstance(command, wire.ResetPrefixCache):
            self._thread.reset_prefix_cache()
        elif isinstance(command, wire.DescribeRequests):
            self._thread.describe()
        elif isinstance(command, wire.LoadVariant | wire.ChangeEngine):
            self._read(command)
        elif isinstance(command, wire.UnloadVariant):
            self._thread.unload_variant(command.variant)
        elif command.params.structured_outputs is not None or command.budgeted is not None:
            with self._lock:
                self._compiling.add(command.request_id)
            # Compiling may take seconds, so it has a thread of its own.
            run_in_daemon(functools.partial(self._compile_and_add, command), "jaxis-compile")
        else:
            self._thread.add(command.submission(None))

    def _read(self, command: wire.LoadVariant | wire.ChangeEngine) -> None:
        """Carries out what may read files for a while."""
        if isinstance(command, wire.LoadVariant):
            read = functools.partial(self._thread.load_variant, command.call_id, command.source)
        else:
            read = functools.partial(self._thread.change, command.call_id, command.change)
        is_quick = isinstance(command, wire.ChangeEngine) and not isinstance(command.change, UpdateWeights)
        if command.waits or is_quick:
            read()
        else:
            run_in_daemon(read, "jaxis-read")

    def _compile_and_add(self, command: wire.AddRequest) -> None:
        request_id = command.request_id
        grammar: Grammar | None = None
        error: Exception | None = None
        try:
            grammar = command.grammar(self._engine.grammar_compiler)
        except Exception as fault:
            error = fault
        with self._lock:
            self._compiling.remove(request_id)
            if request_id in self._aborted:
                self._aborted.remove(request_id)
                error = EngineError("the request was aborted")
            if error is None:
                self._thread.add(command.submission(grammar))
        if error is not None:
            self._send_outputs(EngineOutputs(errors=[(request_id, error)]))

    def heartbeat(self) -> wire.Heartbeat:
        """See `Worker.heartbeat`."""
        if self._thread.is_stalled(self._stall_seconds):
            # Devices that wait for each other do so forever. With one host, the server's process decides.
            self._hosts.give_up(f"a step has taken more than {self._stall_seconds:g} s")
        # Other engines get blocks between steps too.
        stats = dataclasses.replace(self._thread.stats, kv_tiers=self._engine.connector.stats)
        return wire.Heartbeat(self._thread.is_making_progress(self._stall_seconds), stats)

    def _send_outputs(self, new: EngineOutputs) -> None:
        self.send(wire.StepOutputs.of(new))

    def _end_with_failure(self, error: BaseException) -> None:
        """Ends this process; a step that waits for a lost host may never return."""
        self.send_failure(error)
        os._exit(1)


def end_with(connection: socket.socket, is_served: threading.Event) -> None:
    """Ends this process if the server closes the connection before the engine serves it: no request can be waiting.

    Once the engine serves the connection, the serving thread notices its end, perhaps before this thread looks.
    """
    if not connection.recv(1, socket.MSG_PEEK) and not is_served.is_set():
        os._exit(1)


def _wait_for_memory(connection: socket.socket, num_bytes: int) -> None:
    """Waits until the server has made room for the engine, or ends the process with it."""
    connection.sendall(to_frame(wire.LoadPlanned(num_bytes)))
    if not sys.stdin.readline():
        os._exit(1)


class BuildWorker(Protocol):
    """Builds an engine of some kind."""

    def __call__(
        self,
        args: EngineArgs,
        progress: ProgressDisplay,
        *,
        shared: MemoryBudget | None,
        admit: Callable[[int], None] | None,
    ) -> tuple[msgspec.Struct, Callable[[socket.socket, float], Worker]]:
        """The report that it is ready, and what makes its worker of a connection and of how long a step may take.

        Args:
          args: The engine's arguments.
          progress: Shows what is going on.
          shared: The host's memory where other engines share it; see `build_engine`.
          admit: Called with the bytes of memory that it will take, before it reads its weights.
        """
        ...


def serve_parent(build: BuildWorker) -> None:
    """Builds the engine that the first line on stdin describes, and serves it to the process that wrote the line."""
    # The server's process decides when to end. A signal sent to both must not cut off the requests that it drains.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    connection = socket.socket(fileno=int(sys.argv[1]))
    is_served = threading.Event()
    threading.Thread(target=end_with, args=(connection, is_served), name="jaxis-orphan", daemon=True).start()
    settings: dict[str, Any] = json.loads(sys.stdin.readline())
    if settings["log"] is not None:
        from jaxis.host.logs import set_up_logs

        set_up_logs(**settings["log"])
    from jaxis.engine.arguments import EngineArgs
    from jaxis.engine.memory_budget import MemoryBudget
    from jaxis.host.progress import ProgressDisplay

    progress = ProgressDisplay()
    shared, admit = None, None
    if settings.get("shared") is not None:
        shared, admit = MemoryBudget(**settings["shared"]), functools.partial(_wait_for_memory, connection)
    try:
        ready, make_worker = build(EngineArgs(**settings["engine"]), progress, shared=shared, admit=admit)
    except JaxisError as error:
        connection.sendall(to_frame(wire.EngineFailed.of(error)))
        return
    # What start-up made stays: a collection need not look at it again.
    gc.collect()
    gc.freeze()
    connection.sendall(to_frame(ready))
    is_served.set()
    with progress.silent():
        make_worker(connection, settings["stall_seconds"]).run()


def _build(
    args: EngineArgs,
    progress: ProgressDisplay,
    *,
    shared: MemoryBudget | None,
    admit: Callable[[int], None] | None,
) -> tuple[wire.EngineReady, Callable[[socket.socket, float], Worker]]:
    from jaxis.engine.setup import build_engine

    built = build_engine(args, progress, shared=shared, admit=admit)
    return wire.EngineReady(EngineInfo.of(built)), functools.partial(EngineWorker, built)


if __name__ == "__main__":
    serve_parent(_build)
