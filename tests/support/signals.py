"""Ctrl-C in tests, also where pytest runs in the background of a shell that ignores it."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator


@contextlib.contextmanager
def sigint_as_usual() -> Iterator[None]:
    """SIGINT raises KeyboardInterrupt here, and ends or interrupts the processes that the block starts.

    A process that starts with SIGINT ignored keeps ignoring it, and so do its children: Python installs no handler.
    One that is handled is reset for children.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
