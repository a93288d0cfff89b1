"""The best step of a run, by a metric of the held-out rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxis.errors import ConfigError


@dataclass
class BestStep:
    """The best step so far.

    Attributes:
      metric: Name of the metric in metrics.jsonl.
      is_greater: True if larger values are better.
      step: The best step; None: nothing has been measured.
      value: Value of the metric at the best step.
    """

    metric: str
    is_greater: bool
    step: int | None = None
    value: float | None = None

    def improves(self, step: int, measured: Mapping[str, float]) -> bool:
        """Records a step's measurements; returns whether the step is better than all before it.

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
        """Returns the state that a checkpoint saves."""
        return {"step": self.step, "value": self.value}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restores the state that `state` returned."""
        self.step, self.value = state.get("step"), state.get("value")
