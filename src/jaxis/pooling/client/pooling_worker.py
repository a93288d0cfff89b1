"""Worker that passes messages between the server's process and the thread of an embedding model."""

from __future__ import annotations

import functools
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING

from jaxis.engine.client.wire import AbortRequest, Heartbeat
from jaxis.engine.client.worker import STOP_SECONDS, Worker
from jaxis.pooling.client.pooling_thread import PoolingThread
from jaxis.pooling.client.wire import COMMANDS, Command, PoolingReady

if TYPE_CHECKING:
    from jaxis.engine.arguments import EngineArgs
    from jaxis.engine.memory_budget import MemoryBudget
    from jaxis.host.progress import ProgressDisplay
    from jaxis.pooling.pooling_model import PoolingModel


class PoolingWorker(Worker):
    """Passes messages between a socket and a model's thread.

    Args:
      model: The model.
      connection, stall_seconds: Arguments of `Worker`.
    """

    def __init__(self, model: PoolingModel, connection: socket.socket, stall_seconds: float) -> None:
        super().__init__(connection, COMMANDS, stall_seconds)
        self._thread = PoolingThread(model, self.send, self.send_failure)

    def start(self) -> None:
        self._thread.start()

    def carry_out(self, command: Command) -> None:
        if isinstance(command, AbortRequest):
            self._thread.abort(command.request_id)
        else:
            self._thread.add(command)

    def heartbeat(self) -> Heartbeat:
        return Heartbeat(self._thread.is_making_progress(self._stall_seconds), self._thread.stats)

    def stop(self) -> None:
        self._thread.stop(STOP_SECONDS)


def build(
    args: EngineArgs,
    progress: ProgressDisplay,
    *,
    shared: MemoryBudget | None,
    admit: Callable[[int], None] | None,
) -> tuple[PoolingReady, Callable[[socket.socket, float], Worker]]:
    """Builds the worker; an implementation of `BuildWorker`."""
    from jaxis.engine.opened_model import open_model
    from jaxis.pooling.embedder import load_bytes, open_embedder

    del shared  # the memory is fixed: no cache grows with it
    opened = open_model(args)
    if admit is not None:
        admit(load_bytes(opened.path))
    embedder = open_embedder(args, opened, progress)
    embedder.model.precompile()
    return PoolingReady(embedder.info), functools.partial(PoolingWorker, embedder.model)
