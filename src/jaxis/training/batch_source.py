"""Where the batch of each step comes from: from the rows of files, or from what the model itself says."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from jaxis.host.progress import ProgressDisplay
from jaxis.layers.module import JaxModule
from jaxis.training.batches import TrainingBatch
from jaxis.training.data import Split


@dataclass(frozen=True)
class Moment:
    """A run before one of its steps.

    Attributes:
      step: From 0.
      model: Gives the model with the weights of the moment.
      write_answer: Takes a line of answers.jsonl.
      progress: Shows what is compiled.
    """

    step: int
    model: Callable[[], JaxModule]
    write_answer: Callable[[dict[str, Any]], None]
    progress: ProgressDisplay


class BatchSource(Protocol):
    """The batches of a run."""

    @property
    def shown(self) -> Sequence[str]:
        """Names of what the printed lines show of what is reported, beside the loss."""
        ...

    @property
    def steps_per_epoch(self) -> int:
        """Steps in which every row is seen once."""
        ...

    def draw(self, moment: Moment) -> tuple[TrainingBatch, Mapping[str, float]]:
        """The batch of a step, and what is reported of it."""
        ...

    def check(self, step: int, values: Mapping[str, float]) -> None:
        """Raises EngineError if what was reported of a step, from 1, must end the run."""
        ...

    def summary(self) -> Sequence[str]:
        """Lines for the user at the end of a run."""
        ...

    def close(self) -> None:
        """Frees what drawing took."""
        ...


@dataclass(frozen=True)
class GivenBatches:
    """The batches of files; see `BatchSource`."""

    split: Split
    shown: Sequence[str] = ()

    @property
    def steps_per_epoch(self) -> int:
        return self.split.batches.steps_per_epoch

    def draw(self, moment: Moment) -> tuple[TrainingBatch, Mapping[str, float]]:
        return self.split.placed(self.split.batches.batch(moment.step)), {}

    def check(self, step: int, values: Mapping[str, float]) -> None:
        """Any batch will do."""

    def summary(self) -> Sequence[str]:
        return ()

    def close(self) -> None:
        """There is nothing to free."""
