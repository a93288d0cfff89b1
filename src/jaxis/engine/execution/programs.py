"""The compiled programs of a model: one for each step shape, compiled once, in parallel, and cached on disk.

Tracing holds the GIL but compiling does not, so programs that are needed soon compile in parallel.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

from jaxis.engine.execution.executor import Executor
from jaxis.engine.execution.program_key import Compiled, ProgramKey

logger = logging.getLogger(__name__)


class CompileWait(NamedTuple):
    """A step's wait for a program to compile, as `time.monotonic` seconds.

    Attributes:
      started: Time when the wait began.
      ended: Time when the step continued; None while it waits.
    """

    started: float
    ended: float | None = None


class Programs:
    """The programs of an executor, by key.

    `on_wait(what)` is a context manager entered while a step waits for a program to compile; `what` is the description
    of the program's key.

    Attributes:
      executor: Executor that compiles and runs them.
      last_wait: The last wait for a program; None before the first. Other threads may read it at any time.
    """

    def __init__(self, executor: Executor, on_wait: Callable[[str], AbstractContextManager[None]]) -> None:
        self.executor = executor
        self._on_wait = on_wait
        self._programs: dict[ProgramKey, Future[Compiled]] = {}
        self._lock = threading.Lock()
        self.last_wait: CompileWait | None = None
        self._workers = ThreadPoolExecutor(max_workers=2, thread_name_prefix="jaxis-compile")
        self._worker_of_waits = ThreadPoolExecutor(max_workers=1, thread_name_prefix="jaxis-compile-now")

    def run(self, key: ProgramKey, *operands: Any) -> Any:
        """Dispatches the program of a key, compiled first if need be; see `ProgramKey.run`."""
        return self.executor.run(key, self.get(key), *operands)

    def precompile(self, key: ProgramKey) -> Future[Compiled]:
        """Starts compiling the program of a key, unless that was already started.

        The result is cancelled if the program is in the queue when `get` is called.
        """
        with self._lock:
            if key not in self._programs:
                self._programs[key] = self._workers.submit(self._timed_compile, key)
            return self._programs[key]

    def has(self, key: ProgramKey) -> bool:
        """Returns whether the program of a key was compiled, or failed to be."""
        future = self._programs.get(key)
        return future is not None and future.done()

    def get(self, key: ProgramKey) -> Compiled:
        """Returns the program of a key; waits until it is compiled."""
        future = self.precompile(key)
        with self._lock:
            if future.cancel():  # in the queue, behind programs that no step waits for
                future = self._programs[key] = self._worker_of_waits.submit(self._timed_compile, key)
        if not future.done():
            self.last_wait = wait = CompileWait(time.monotonic())
            with self._on_wait(key.description):
                future.exception()
            self.last_wait = wait._replace(ended=time.monotonic())
        try:
            return future.result()
        except Exception:
            with self._lock:
                self._programs.pop(key, None)
            raise

    def close(self) -> None:
        """Drops the programs, after waiting for those that are compiling, and closes the executor."""
        for workers in (self._workers, self._worker_of_waits):
            workers.shutdown(wait=True, cancel_futures=True)
        self._programs.clear()
        self.executor.close()

    def _timed_compile(self, key: ProgramKey) -> Compiled:
        start = time.perf_counter()
        program = self.executor.compile(key)
        logger.debug("compiled %s in %.1f s", key, time.perf_counter() - start)
        return program
