from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from typing import Any


class Meter:
    """Measures tokens per second, and the remaining time of a training of `total` steps."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._last = time.perf_counter()
        self._seconds: deque[float] = deque(maxlen=50)

    def add(self, num_tokens: int) -> dict[str, float]:
        """Counts a step; returns its values for metrics.jsonl."""
        now = time.perf_counter()
        seconds, self._last = now - self._last, now
        self._seconds.append(seconds)
        return {"tokens_per_second": round(num_tokens / seconds, 1)}

    def line(self, values: Mapping[str, Any]) -> str:
        """Returns a line about a step for the user. The remaining time assumes the median time of the last steps."""
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
