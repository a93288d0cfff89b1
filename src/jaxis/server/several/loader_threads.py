"""Threads that start engines, each of which takes seconds to minutes."""

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

    Threads and processes inherit the priority of the thread that starts them, and a server lowers that of its event
    loop. One thread, made before that, therefore starts all others.
    """

    def __init__(self) -> None:
        self._tasks: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        threading.Thread(target=self._start, name="jaxis-loader", daemon=True).start()

    async def run(self, function: Callable[[], Result]) -> Result:
        """Returns the function's result. The function runs to its end even if the caller is cancelled."""
        future: Future[Future[Result]] = Future()
        self._tasks.put((function, future))
        return await asyncio.wrap_future(await asyncio.wrap_future(future))

    def close(self) -> None:
        """Stops starting functions. Running ones continue."""
        self._tasks.put(None)

    def _start(self) -> None:
        while (task := self._tasks.get()) is not None:
            function, future = task
            if future.set_running_or_notify_cancel():
                future.set_result(run_in_daemon(function, "jaxis-load"))
            del task, function, future  # otherwise they would live until the next task
