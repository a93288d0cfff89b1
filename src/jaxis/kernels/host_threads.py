"""Threads for native code that processes weights on the host during loading."""

from __future__ import annotations

import functools
import os
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from types import TracebackType
from typing import TypeVar

T = TypeVar("T")

_JOBS_PER_THREAD = 4
_this_thread = threading.local()


def for_each_part(function: Callable[[int, int], T], size: int, part_size: int) -> list[T]:
    """Calls `function(first, last)` for each part of `range(size)`, in parallel as far as it releases the GIL.

    Inside a job of `BackgroundJobs`, which has the other jobs beside it, one part after the other.

    Raises:
      Exception: The error of the first part that failed.
    """
    parts = [(first, min(first + part_size, size)) for first in range(0, size, part_size)]
    if len(parts) == 1 or getattr(_this_thread, "is_worker", False):
        return [function(*part) for part in parts]
    return list(_threads().map(lambda part: function(*part), parts))


class BackgroundJobs:
    """Jobs that run on these threads while the caller goes on. A context manager: its end waits for all of them.

    At most a few jobs per thread wait their turn, so that what they hold is bounded.
    """

    def __init__(self) -> None:
        self._jobs: deque[Future[None]] = deque()

    def submit(self, job: Callable[[], None]) -> None:
        """Runs the job on one of the threads, after waiting until there is room for it.

        Raises:
          Exception: The error of an earlier job.
        """
        while len(self._jobs) >= _JOBS_PER_THREAD * _num_threads():
            self._jobs.popleft().result()
        self._jobs.append(_threads().submit(job))

    def __enter__(self) -> BackgroundJobs:
        return self

    def __exit__(self, _: type[BaseException] | None, error: BaseException | None, __: TracebackType | None) -> None:
        wait(self._jobs)
        if error is None:
            for job in self._jobs:
                job.result()


@functools.cache
def _threads() -> ThreadPoolExecutor:
    def mark() -> None:
        _this_thread.is_worker = True

    return ThreadPoolExecutor(_num_threads(), thread_name_prefix="jaxis-weights", initializer=mark)


@functools.cache
def _num_threads() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
