"""Sources of batches: data files (`GivenBatches`), or the model's own answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from jaxis.host.progress import ProgressDisplay
from jaxis.layers.module import JaxModule
from jaxis.training.batches import TrainingBatch
from jaxis.training.data import Split


@dataclass(frozen=True)
class StepContext:
    """The state of a run just before the step with number `step`, from 0.

    `model` returns the model with the current weights, and `write_answer` writes a line of answers.jsonl.
    """

    step: int
    model: Callable[[], JaxModule]
    write_answer: Callable[[dict[str, Any]], None]
    progress: ProgressDisplay


class BatchSource(Protocol):
    @property
    def shown(self) -> Sequence[str]:
        """Names of reported values that printed lines show beside the loss."""
        ...

    @property
    def steps_per_epoch(self) -> int:
        """Number of steps that use every data row once."""
        ...

    def draw(self, context: StepContext) -> tuple[TrainingBatch, Mapping[str, float]]:
        """Returns the batch of a step and the values to report about it."""
        ...

    def check(self, step: int, values: Mapping[str, float]) -> None:
        """Raises EngineError if the values that a step (from 1) reported must end the run."""
        ...

    def summary(self) -> Sequence[str]:
        """Returns lines for the user at the end of a run."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class GivenBatches:
    """Source of batches that come from data files."""

    split: Split
    shown: Sequence[str] = ()

    @property
    def steps_per_epoch(self) -> int:
        return self.split.batches.steps_per_epoch

    def draw(self, context: StepContext) -> tuple[TrainingBatch, Mapping[str, float]]:
        return self.split.placed(self.split.batches.batch(context.step)), {}

    def check(self, step: int, values: Mapping[str, float]) -> None:
        """Accepts every step."""

    def summary(self) -> Sequence[str]:
        return ()

    def close(self) -> None:
        """Does nothing."""
