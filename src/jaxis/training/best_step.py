from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxis.errors import ConfigError


@dataclass
class BestStep:
    """The best step so far, by a metric of metrics.jsonl; None before anything has been measured.

    If `is_greater`, larger values are better.
    """

    metric: str
    is_greater: bool
    step: int | None = None
    value: float | None = None

    def improves(self, step: int, measured: Mapping[str, float]) -> bool:
        """Records a step's measurements; returns whether the step is better than all before it.

        Raises ConfigError if the metric was not measured.
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
        return {"step": self.step, "value": self.value}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.step, self.value = state.get("step"), state.get("value")
