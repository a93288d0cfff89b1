"""Threads of the host for native code that processes weights during loading."""

from __future__ import annotations

import functools
import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from types import TracebackType
from typing import TypeVar

from jaxis.host.cores import usable_cores

T = TypeVar("T")

_JOBS_PER_THREAD = 4
_this_thread = threading.local()


def for_each_part(function: Callable[[int, int], T], size: int, part_size: int) -> list[T]:
    """Calls `function(first, last)` for each part of `range(size)`, in parallel as far as it releases the GIL.

    A job of `BackgroundJobs` computes its parts one after the other, since other jobs run at the same time. Raises the
    error of the first part that failed.
    """
    return list(begin_each_part(function, size, part_size))


def begin_each_part(function: Callable[[int, int], T], size: int, part_size: int) -> Iterable[T]:
    """Begins `for_each_part`, and returns its results, which are waited for as they are read."""
    parts = [(first, min(first + part_size, size)) for first in range(0, size, part_size)]
    if len(parts) == 1 or getattr(_this_thread, "is_worker", False):
        return [function(*part) for part in parts]
    return _threads().map(lambda part: function(*part), parts)


class BackgroundJobs:
    """Jobs that run on these threads while the caller goes on. The end of the context manager waits for all of them.

    At most a few jobs per thread wait in the queue, which bounds the memory that they hold.
    """

    def __init__(self) -> None:
        self._jobs: deque[Future[None]] = deque()

    def submit(self, job: Callable[[], None]) -> None:
        """Waits until the queue has room, then runs the job on a thread. Raises the error of an earlier job."""
        while len(self._jobs) >= _JOBS_PER_THREAD * usable_cores():
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

    return ThreadPoolExecutor(usable_cores(), thread_name_prefix="jaxis-weights", initializer=mark)
