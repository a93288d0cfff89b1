"""The engine's process: builds an engine, steps it in a thread, and does what the server's process asks for.

`EngineProcess` starts it as `python -m jaxis.engine.frontend.engine_worker SOCKET`. It ends when the other end of the
socket does.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import signal
import socket
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import psutil

from jaxis.engine.frontend import wire
from jaxis.engine.frontend.engine_thread import EngineThread, Outbox, Submission
from jaxis.errors import EngineError, JaxisError

if TYPE_CHECKING:
    from jaxis.engine.grammar.delayed_grammar import Grammar
    from jaxis.engine.setup import BuiltEngine

RECEIVE_BYTES = 1 << 20
ALIVE_SECONDS = 0.5
STOP_SECONDS = 10.0
_logger = logging.getLogger(__name__)


class EngineWorker:
    """Carries messages between a socket and an engine's thread.

    Args:
      built: The engine.
      connection: To the server's process.
      stall_seconds: How long a step may take; see `EngineThread.is_making_progress`.
    """

    def __init__(self, built: BuiltEngine, connection: socket.socket, stall_seconds: float) -> None:
        self._engine = built.engine
        self._connection = connection
        self._stall_seconds = stall_seconds
        self._send_lock = threading.Lock()
        self._ended = threading.Event()
        self._thread = EngineThread(built.engine, self._on_outbox, self._on_failure)
        self._compilers = ThreadPoolExecutor(2, "jaxis-compile")
        # Requests whose form is compiled, and those of them that are to be dropped then.
        self._compiling: set[str] = set()
        self._dropped: set[str] = set()
        self._lock = threading.Lock()

    def run(self) -> None:
        """Serves until the other end is closed."""
        self._thread.start()
        threading.Thread(target=self._tell_alive, name="jaxis-alive", daemon=True).start()
        frames = wire.FrameReader()
        while data := self._connection.recv(RECEIVE_BYTES):
            for frame in frames.feed(data):
                self._carry_out(wire.decode_command(frame))
        self._ended.set()
        self._compilers.shutdown(wait=False, cancel_futures=True)
        self._thread.stop(STOP_SECONDS)

    def _carry_out(self, command: wire.Command) -> None:
        if isinstance(command, wire.Abort):
            with self._lock:
                if command.request_id in self._compiling:
                    self._dropped.add(command.request_id)
                else:
                    self._thread.abort(command.request_id)
        elif "structured_outputs" in command.params:
            self._compiling.add(command.request_id)
            self._compilers.submit(self._compile_and_add, command)  # may take seconds
        else:
            self._add(command, None)

    def _compile_and_add(self, command: wire.Add) -> None:
        request_id, error, grammar = command.request_id, None, None
        try:
            form = wire.params_from_fields(command.params).structured_outputs
            grammar = wire.delayed(self._engine.grammar_compiler.compile(form), command.delay)
        except Exception as fault:
            error = fault
        with self._lock:
            self._compiling.remove(request_id)
            if request_id in self._dropped:
                self._dropped.remove(request_id)
                error = EngineError("the request was aborted")
            if error is None:
                self._add(command, grammar)
        if error is not None:
            self._send(wire.Step([wire.Refused(request_id, type(error).__name__, str(error))]))

    def _add(self, command: wire.Add, grammar: Grammar | None) -> None:
        params = wire.params_from_fields(command.params)
        request_id = command.request_id
        self._thread.add(
            Submission(request_id, request_id, command.prompt, params, command.priority, command.final_only, grammar)
        )

    def _on_outbox(self, outbox: Outbox) -> None:
        self._send(
            wire.Step(
                [
                    wire.Refused(request_id, type(result).__name__, str(result))
                    if isinstance(result, Exception)
                    else wire.to_delta(result)
                    for request_id, result in outbox
                ]
            )
        )

    def _on_failure(self, error: BaseException) -> None:
        self._send(wire.Failed.of(error))

    def _tell_alive(self) -> None:
        process = psutil.Process()
        while not self._ended.wait(ALIVE_SECONDS):
            stats = dataclasses.replace(self._thread.stats, process_memory_bytes=process.memory_info().rss)
            self._send(wire.Alive(self._thread.is_making_progress(self._stall_seconds), stats))

    def _send(self, report: wire.Report) -> None:
        try:
            with self._send_lock:
                self._connection.sendall(wire.to_frame(report))
        except OSError:
            _logger.debug("the server's process has ended")


def _end_with(connection: socket.socket) -> None:
    """Ends this process when the other end is closed before anything came from it: nobody waits for the engine."""
    if not connection.recv(1, socket.MSG_PEEK):
        os._exit(1)


def main() -> None:
    """Builds the engine that the first line on stdin describes, and serves it."""
    # The server's process decides when to end; a signal to both would cut off what it lets end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    connection = socket.socket(fileno=int(sys.argv[1]))
    threading.Thread(target=_end_with, args=(connection,), name="jaxis-orphan", daemon=True).start()
    settings: dict[str, Any] = json.loads(sys.stdin.readline())
    if settings["log"] is not None:
        from jaxis.host.logs import set_up_logs

        set_up_logs(**settings["log"])
    from jaxis.engine.setup import EngineArgs, build_engine
    from jaxis.host.progress import ProgressDisplay

    progress = ProgressDisplay()
    try:
        built = build_engine(EngineArgs(**settings["engine"]), progress)
    except JaxisError as error:
        connection.sendall(wire.to_frame(wire.Failed.of(error)))
        return
    connection.sendall(wire.to_frame(wire.built_report(built)))
    with progress.silent():
        EngineWorker(built, connection, settings["stall_seconds"]).run()


if __name__ == "__main__":
    main()
