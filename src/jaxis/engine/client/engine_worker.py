"""Passes messages between the server's process and the thread of an engine that generates."""

from __future__ import annotations

import dataclasses
import functools
import os
import socket
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from jaxis.engine.client import wire
from jaxis.engine.client.engine_change import UpdateWeights
from jaxis.engine.client.engine_client import EngineInfo, EngineOutputs
from jaxis.engine.client.engine_thread import EngineThread
from jaxis.engine.client.worker import STOP_SECONDS, Worker
from jaxis.engine.setup import build_engine
from jaxis.errors import EngineError
from jaxis.host.threads import run_in_daemon

if TYPE_CHECKING:
    from jaxis.engine.arguments import EngineArgs
    from jaxis.engine.grammar.matcher import Grammar
    from jaxis.engine.memory_budget import MemoryBudget
    from jaxis.engine.setup import BuiltEngine
    from jaxis.host.progress import ProgressDisplay


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
        elif isinstance(command, wire.LoadAdapter | wire.ChangeEngine):
            self._read(command)
        elif isinstance(command, wire.UnloadAdapter):
            self._thread.unload_adapter(command.adapter)
        elif command.params.structured_outputs is not None or command.budgeted is not None:
            with self._lock:
                self._compiling.add(command.request_id)
            # Compiling may take seconds, so it has a thread of its own.
            run_in_daemon(functools.partial(self._compile_and_add, command), "jaxis-compile")
        else:
            self._thread.add(command.submission(None))

    def _read(self, command: wire.LoadAdapter | wire.ChangeEngine) -> None:
        """Carries out what may read files for a while."""
        if isinstance(command, wire.LoadAdapter):
            read = functools.partial(self._thread.load_adapter, command.call_id, command.source)
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


def build(
    args: EngineArgs,
    progress: ProgressDisplay,
    *,
    shared: MemoryBudget | None,
    admit: Callable[[int], None] | None,
) -> tuple[wire.EngineReady, Callable[[socket.socket, float], Worker]]:
    """See `BuildWorker`."""
    built = build_engine(args, progress, shared=shared, admit=admit)
    return wire.EngineReady(EngineInfo.of(built)), functools.partial(EngineWorker, built)
