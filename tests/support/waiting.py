"""Waiting for something to become so: as long as it takes, up to a limit that only a failure reaches."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest

SECONDS = 60.0


def wait_until(condition: Callable[[], object], seconds: float = SECONDS) -> None:
    """Waits until the condition holds.

    Raises:
      AssertionError: It did not in time.
    """
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not so after {seconds:g} s"
        time.sleep(0.005)


async def eventually(condition: Callable[[], object], seconds: float = SECONDS) -> None:
    """Waits as `wait_until` does, while other coroutines run."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not so after {seconds:g} s"
        await asyncio.sleep(0.001)


@contextlib.contextmanager
def a_minute_later(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Lets a minute pass for the clock by which steps of the engine's thread are stalls."""
    with monkeypatch.context() as patch:
        clock = SimpleNamespace(monotonic=lambda: time.monotonic() + 60)
        patch.setattr("jaxis.engine.client.engine_thread.time", clock)
        yield
