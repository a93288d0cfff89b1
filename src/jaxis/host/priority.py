"""The processor time that threads get."""

from __future__ import annotations

import os
import sys
import threading

NICENESS = 5


def yield_to_others() -> None:
    """Lowers the priority of the calling thread, and of the threads and processes that it will start.

    They still get all the processor time that nobody else wants, and about a quarter of a processor where others want
    all of it. Does nothing outside Linux, where a thread has no priority of its own.
    """
    if sys.platform == "linux":
        thread = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread, max(NICENESS, os.getpriority(os.PRIO_PROCESS, thread)))
