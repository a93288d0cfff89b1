"""Threads in which engines are started, each of which takes seconds to minutes."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from jaxis.host.threads import run_in_daemon

Result = TypeVar("Result")


class LoaderThreads:
    """Runs each function in a thread of its own.

    A thread hands its priority on to threads and processes that it starts, and a server lowers that of its event loop.
    So all are started by a thread that was made before.
    """

    def __init__(self) -> None:
        self._tasks: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        threading.Thread(target=self._start, name="jaxis-loader", daemon=True).start()

    async def run(self, function: Callable[[], Result]) -> Result:
        """The function's result; it runs to its end also if the caller is cancelled."""
        future: Future[Future[Result]] = Future()
        self._tasks.put((function, future))
        return await asyncio.wrap_future(await asyncio.wrap_future(future))

    def close(self) -> None:
        """Starts no more; those that run go on."""
        self._tasks.put(None)

    def _start(self) -> None:
        while (task := self._tasks.get()) is not None:
            function, future = task
            if future.set_running_or_notify_cancel():
                future.set_result(run_in_daemon(function, "jaxis-load"))
            del task, function, future  # they would stay until the next one
