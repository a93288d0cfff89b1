"""Which step of a run was the best, by a metric of the held-out rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxis.errors import ConfigError


@dataclass
class BestStep:
    """The best step so far.

    Attributes:
      metric: Its name in metrics.jsonl.
      is_greater: Whether larger values are better.
      step: The step; None: none was measured.
      value: What was measured there.
    """

    metric: str
    is_greater: bool
    step: int | None = None
    value: float | None = None

    def improves(self, step: int, measured: Mapping[str, float]) -> bool:
        """Takes note of a step; whether it is better than all before it.

        Raises:
          ConfigError: The metric was not measured.
        """
        if self.metric not in measured:
            raise ConfigError(
                f"training.trainer_kwargs.metric_for_best_model={self.metric!r} is not measured; known: "
                f"{', '.join(sorted(measured))}"
            )
        value = measured[self.metric]
        if self.value is not None and not (value > self.value if self.is_greater else value < self.value):
            return False
        self.step, self.value = step, value
        return True

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps of it."""
        return {"step": self.step, "value": self.value}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on from what `state` returned."""
        self.step, self.value = state.get("step"), state.get("value")
