"""Threads for what native code does with weights on the host while they are loaded."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


def for_each_part(function: Callable[[int, int], T], size: int, part_size: int) -> list[T]:
    """`function(first, last)` of each part of `range(size)`, side by side as far as it gives up Python's lock.

    Raises:
      Exception: What the first part that failed raised.
    """
    parts = [(first, min(first + part_size, size)) for first in range(0, size, part_size)]
    return list(_threads().map(lambda part: function(*part), parts))


@functools.cache
def _threads() -> ThreadPoolExecutor:
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return ThreadPoolExecutor(count, thread_name_prefix="jaxis-weights")
