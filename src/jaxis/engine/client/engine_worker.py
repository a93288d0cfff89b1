"""The worker of an engine that generates."""

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
      connection: Socket to the server's process.
      stall_seconds: Longest time of a step, as in `EngineThread.is_making_progress`.
    """

    def __init__(self, built: BuiltEngine, connection: socket.socket, stall_seconds: float) -> None:
        super().__init__(connection, wire.COMMANDS, stall_seconds)
        self._engine, self._hosts = built.engine, built.hosts
        self._thread = EngineThread(built, self._send_outputs, self.send_failure)
        built.hosts.when_lost(self._end_with_failure, stall_seconds)
        built.engine.grammar_compiler.prepare()
        # Requests whose grammar is being compiled, and those of them that were aborted meanwhile.
        self._compiling: set[str] = set()
        self._aborted: set[str] = set()
        self._lock = threading.Lock()

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        if self._thread.stop(STOP_SECONDS):
            self._engine.connector.close()
        self._hosts.end()

    def carry_out(self, command: wire.Command) -> None:
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
            # Compiling may take seconds, so it runs on another thread.
            run_in_daemon(functools.partial(self._compile_and_add, command), "jaxis-compile")
        else:
            self._thread.add(command.submission(None))

    def _read(self, command: wire.LoadAdapter | wire.ChangeEngine) -> None:
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
        if self._thread.is_stalled(self._stall_seconds):
            # Devices of several hosts could wait for each other forever. With one host, the server's process decides.
            self._hosts.give_up(f"a step has taken more than {self._stall_seconds:g} s")
        # The counters of a step do not include blocks that other engines fetch between steps.
        stats = dataclasses.replace(self._thread.stats, kv_tiers=self._engine.connector.stats)
        return wire.Heartbeat(self._thread.is_making_progress(self._stall_seconds), stats)

    def _send_outputs(self, new: EngineOutputs) -> None:
        self.send(wire.StepOutputs.of(new))

    def _end_with_failure(self, error: BaseException) -> None:
        """Ends this process, since a step that waits for a lost host may never return."""
        self.send_failure(error)
        os._exit(1)


def build(
    args: EngineArgs,
    progress: ProgressDisplay,
    *,
    shared: MemoryBudget | None,
    admit: Callable[[int], None] | None,
) -> tuple[wire.EngineReady, Callable[[socket.socket, float], Worker]]:
    """Builds an engine that generates, as a `BuildWorker`."""
    built = build_engine(args, progress, shared=shared, admit=admit)
    return wire.EngineReady(EngineInfo.of(built)), functools.partial(EngineWorker, built)
