"""Threads: pools with a bound, threads that end with the process, and deadlines."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

Result = TypeVar("Result")


@dataclass(eq=False)
class _Task:
    size: float
    function: Callable[[], Any]
    future: Future[Any]


class SizedExecutor:
    """Runs tasks in threads; `largest` has the size of the largest task of each, at least one of them infinite.

    A thread with a limit takes the smallest waiting task, so a task waits only for smaller ones and those that run. A
    thread without a limit takes the oldest task, so none waits for ever.

    The threads are daemons: a task that does not end does not keep the process alive.
    """

    def __init__(self, largest: Sequence[float], name: str) -> None:
        self._largest = tuple(largest)
        self._name = name
        self._lock = threading.Lock()
        self._idle: dict[float, list[threading.Condition]] = {}  # threads without a task, by the largest they take
        self._waiting: list[_Task] = []  # the oldest first
        self._has_started = self._is_closed = False

    def submit(self, size: float, function: Callable[[], Result]) -> Future[Result]:
        """Queues a task; cancelling its future takes it out of the queue. Raises RuntimeError after `shutdown`."""
        task = _Task(size, function, Future())
        with self._lock:
            if self._is_closed:
                raise RuntimeError("the executor was shut down")
            if not self._has_started:
                self._has_started = True
                for limit in self._largest:
                    threading.Thread(target=self._run, args=(limit,), name=self._name, daemon=True).start()
            self._waiting.append(task)
            self._wake_one(size)
        task.future.add_done_callback(lambda _: self._drop(task))
        return task.future

    @property
    def num_waiting(self) -> int:
        """Number of tasks that no thread has taken yet."""
        return len(self._waiting)

    def shutdown(self) -> None:
        """Ends the threads after the tasks that they run; tasks that wait are cancelled."""
        with self._lock:
            self._is_closed = True
            left, self._waiting = self._waiting, []
            for threads in self._idle.values():
                for thread in threads:
                    thread.notify()
        for task in left:
            task.future.cancel()

    def _wake_one(self, size: float) -> None:
        """Wakes an idle thread that takes this size, if there is one; the others look at the end of their tasks."""
        fitting = [limit for limit, threads in self._idle.items() if threads and size <= limit]
        if fitting:
            self._idle[min(fitting)].pop().notify()

    def _drop(self, task: _Task) -> None:
        """Forgets a task that was cancelled, with what it holds in memory."""
        with self._lock:
            if task in self._waiting:
                self._waiting.remove(task)

    def _run(self, limit: float) -> None:
        while (task := self._take(limit)) is not None:
            if task.future.set_running_or_notify_cancel():
                try:
                    result = task.function()
                except BaseException as error:
                    task.future.set_exception(error)
                else:
                    task.future.set_result(result)
                    del result
            del task  # a thread that waits must not hold the last task's memory

    def _take(self, limit: float) -> _Task | None:
        changed = threading.Condition(self._lock)
        with self._lock:
            while not self._is_closed:
                fitting = [task for task in self._waiting if task.size <= limit]
                if fitting:
                    task = fitting[0] if limit == float("inf") else min(fitting, key=lambda task: task.size)
                    self._waiting.remove(task)
                    return task
                self._idle.setdefault(limit, []).append(changed)
                changed.wait()
        return None


def run_in_daemon(function: Callable[[], Result], name: str) -> Future[Result]:
    """Runs a function in a new thread, which does not keep the process alive.

    Functions that mostly wait need threads of their own: in a pool they would wait for each other too.
    """
    future: Future[Result] = Future()

    def run() -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


class Deadline:
    """A time that progress may put off, and that a caller that no longer waits may bring forward.

    Any thread may call its methods. `is_cancelled` tells that the result is not wanted any more.
    """

    def __init__(self, seconds: float) -> None:
        self._at = time.monotonic() + seconds
        self._is_over = self.is_cancelled = False

    @property
    def left(self) -> float:
        """Seconds that are left; 0 if it is over."""
        return 0.0 if self._is_over else max(0.0, self._at - time.monotonic())

    def put_off(self, seconds: float) -> None:
        """Extends it to at least so many seconds from now, unless it is over."""
        if self.left:
            self._at = max(self._at, time.monotonic() + seconds)

    def end(self) -> None:
        """Ends it at once, for good."""
        self._is_over = True

    def cancel(self) -> None:
        """Ends it, and notes that no caller wants the result."""
        self.is_cancelled = True
        self.end()
