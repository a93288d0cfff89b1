from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def stop_signals() -> Iterator[Callable[[], int | None]]:
    """Holds back SIGTERM and Ctrl-C until a run can stop; a second signal has its usual effect.

    Yields a function that returns the number of the received signal, or None.
    """
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return
    previous = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def receive(number: int, _frame: FrameType | None) -> None:
        received.append(number)
        signal.signal(number, previous[signal.Signals(number)])

    for number in previous:
        signal.signal(number, receive)
    try:
        yield lambda: received[0] if received else None
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
