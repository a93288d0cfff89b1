"""A thread of its own for a function that waits."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

Result = TypeVar("Result")


def run_in_daemon(function: Callable[[], Result], name: str) -> Future[Result]:
    """Runs a function in a new thread, which does not keep the process alive.

    For functions that wait for something most of their time: those of a pool would wait for each other too.
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
