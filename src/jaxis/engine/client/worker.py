"""The messages of an engine's process: between its socket and its thread."""

from __future__ import annotations

import dataclasses
import logging
import os
import socket
import threading

import msgspec
import psutil

from jaxis.engine.client import wire
from jaxis.engine.client.engine_core import EngineCore
from jaxis.engine.client.engine_thread import EngineThread
from jaxis.host.channel import MessageReader, to_frame

RECEIVE_BYTES = 1 << 20
HEARTBEAT_SECONDS = 0.5
STOP_SECONDS = 10.0
_logger = logging.getLogger(__name__)


class Worker:
    """Passes messages between a socket and an engine's thread.

    Args:
      core: The engine.
      connection: Socket to the server's process.
      stall_seconds: Longest time of a step, as in `EngineThread.is_making_progress`.
    """

    def __init__(self, core: EngineCore, connection: socket.socket, stall_seconds: float) -> None:
        self._core, self._connection, self._stall_seconds = core, connection, stall_seconds
        self._thread = EngineThread(core, self._send, self._send_failure)
        core.hosts.when_lost(self._end_with_failure, stall_seconds)
        self._send_lock = threading.Lock()
        self._ended = threading.Event()

    def run(self) -> None:
        """Serves until the server closes its end of the connection."""
        self._thread.start()
        threading.Thread(target=self._send_heartbeats, name="jaxis-heartbeat", daemon=True).start()
        commands = MessageReader(wire.COMMANDS)
        while data := self._connection.recv(RECEIVE_BYTES):
            for command in commands.feed(data):
                self._thread.take(command)
        self._ended.set()
        if self._thread.stop(STOP_SECONDS):
            self._core.close()
        self._core.hosts.end()

    def _send(self, report: msgspec.Struct) -> None:
        try:
            with self._send_lock:
                self._connection.sendall(to_frame(report))
        except OSError:
            _logger.debug("the server's process has ended")

    def _send_failure(self, error: BaseException) -> None:
        self._send(wire.EngineFailed.of(error))

    def _end_with_failure(self, error: BaseException) -> None:
        """Ends this process, since a step that waits for a lost host may never return."""
        self._send_failure(error)
        os._exit(1)

    def _send_heartbeats(self) -> None:
        process = psutil.Process()
        while not self._ended.wait(HEARTBEAT_SECONDS):
            if self._thread.is_stalled(self._stall_seconds):
                # Devices of several hosts could wait for each other forever. With one host, the server's process
                # decides.
                self._core.hosts.give_up(f"a step has taken more than {self._stall_seconds:g} s")
            stats = self._core.renewed(self._thread.stats)
            stats = dataclasses.replace(stats, process_memory_bytes=process.memory_info().rss)
            self._send(wire.Heartbeat(self._thread.is_making_progress(self._stall_seconds), stats))
