"""Waiting for something to become so: as long as it takes, up to a limit that only a failure reaches."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

SECONDS = 60.0


def wait_until(condition: Callable[[], object], seconds: float = SECONDS) -> None:
    """Until the condition holds.

    Raises:
      AssertionError: It did not in time.
    """
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not so after {seconds:g} s"
        time.sleep(0.005)


async def eventually(condition: Callable[[], object], seconds: float = SECONDS) -> None:
    """As `wait_until`, while other coroutines run."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not so after {seconds:g} s"
        await asyncio.sleep(0.001)
