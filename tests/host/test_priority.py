"""A thread that makes room keeps the rest of the process as it was."""

import os
import sys
import threading

import pytest

from jaxis.host.machine import NICENESS, yield_to_others

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="priorities of threads are Linux's")


def test_only_the_calling_thread_and_its_children_yield():
    before = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    seen = []

    def run():
        yield_to_others()
        child = threading.Thread(target=lambda: seen.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id())))
        child.start()
        child.join()

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [max(NICENESS, before)]
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == before
