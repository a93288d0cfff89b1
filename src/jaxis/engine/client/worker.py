"""The common part of the workers of all kinds of engines."""

from __future__ import annotations

import dataclasses
import logging
import socket
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import psutil

from jaxis.engine.client import wire
from jaxis.host.channel import MessageReader, to_frame

if TYPE_CHECKING:
    from jaxis.engine.arguments import EngineArgs
    from jaxis.engine.memory_budget import MemoryBudget
    from jaxis.host.progress import ProgressDisplay

RECEIVE_BYTES = 1 << 20
HEARTBEAT_SECONDS = 0.5
STOP_SECONDS = 10.0
_logger = logging.getLogger(__name__)


class Worker(ABC):
    """Passes messages between a socket and the thread of an engine of any kind.

    Args:
      connection: Socket to the server's process.
      commands: Decoder of the server's commands.
      stall_seconds: Longest time of a step.
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
        """Passes a command of the server's process to the engine's thread."""

    @abstractmethod
    def heartbeat(self) -> wire.Heartbeat:
        """Returns the state of the engine."""

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
        try:
            with self._send_lock:
                self._connection.sendall(to_frame(report))
        except OSError:
            _logger.debug("the server's process has ended")

    def send_failure(self, error: BaseException) -> None:
        """Reports that the engine has failed for good."""
        self.send(wire.EngineFailed.of(error))

    def _send_heartbeats(self) -> None:
        process = psutil.Process()
        while not self._ended.wait(HEARTBEAT_SECONDS):
            beat = self.heartbeat()
            stats = dataclasses.replace(beat.stats, process_memory_bytes=process.memory_info().rss)
            self.send(wire.Heartbeat(beat.is_making_progress, stats))


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
        """Returns the report that the engine is ready, and a function that makes its worker.

        The function takes a connection and the longest time of a step.

        Args:
          args: Arguments of the engine.
          progress: Display of progress.
          shared: Budget of host memory that other engines share; None is all that is free.
          admit: Callback with the bytes of memory that the engine will take, before it reads its weights.
        """
        ...
