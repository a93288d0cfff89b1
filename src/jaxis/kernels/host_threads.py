"""Threads for native code that processes weights on the host during loading."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


def for_each_part(function: Callable[[int, int], T], size: int, part_size: int) -> list[T]:
    """Calls `function(first, last)` for each part of `range(size)`, in parallel as far as it releases the GIL.

    Raises:
      Exception: The error of the first part that failed.
    """
    parts = [(first, min(first + part_size, size)) for first in range(0, size, part_size)]
    return list(_threads().map(lambda part: function(*part), parts))


@functools.cache
def _threads() -> ThreadPoolExecutor:
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return ThreadPoolExecutor(count, thread_name_prefix="jaxis-weights")
