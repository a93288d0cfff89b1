"""How fast a run is, and how long it will take."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from typing import Any


class Meter:
    """Tokens a second, and the time that is left.

    Args:
      total: Steps of the whole training.
    """

    def __init__(self, total: int) -> None:
        self._total = total
        self._last = time.perf_counter()
        self._seconds: deque[float] = deque(maxlen=50)

    def add(self, num_tokens: int) -> dict[str, float]:
        """Counts a step; what metrics.jsonl has of it."""
        now = time.perf_counter()
        seconds, self._last = now - self._last, now
        self._seconds.append(seconds)
        return {"tokens_per_second": round(num_tokens / seconds, 1)}

    def line(self, values: Mapping[str, Any]) -> str:
        """A step for people. The time left is that of steps as long as the last ones, of which half are no longer."""
        recent = sorted(self._seconds)
        left = recent[len(recent) // 2] * (self._total - values["step"])
        rate = values["learned_tokens"] / self._seconds[-1]
        return (
            f"step {values['step']}/{self._total}  loss {values['loss']:.4f}  lr {values['lr']:.2e}  "
            f"grad norm {values['grad_norm']:.3f}  {rate:.0f} learned tokens/s  {_duration(left)} left"
        )


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
