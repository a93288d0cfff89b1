"""The methods of training, one for each trainer type: where its batches come from, and its objective."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jaxis.host.progress import ProgressDisplay
from jaxis.training.base_model import BaseModel
from jaxis.training.config import TrainConfig
from jaxis.training.config.training import DISTILLATION
from jaxis.training.config.training import DPO as DPO_TYPE
from jaxis.training.config.training import GRPO as GRPO_TYPE
from jaxis.training.config.training import SFT as SFT_TYPE
from jaxis.training.data import BatchSource, GivenBatches, Split, load_split
from jaxis.training.distillation.objective import distillation_of
from jaxis.training.distillation.student_answers import load_distillation, load_held_out
from jaxis.training.distillation.teacher import open_teacher
from jaxis.training.examples import Example
from jaxis.training.functional_model import Values
from jaxis.training.grpo.objective import grpo_of
from jaxis.training.grpo.rollouts import load_rollouts
from jaxis.training.objectives import DPO, CrossEntropy, Objective


@dataclass(frozen=True)
class TrainingData:
    """Data of a run.

    Attributes:
      examples: Examples from files; none if they are generated during training.
      num_rows: Number of data rows.
      digests: Digest of each file's content, by path.
      notes: Lines about things that a user may not expect.
    """

    source: BatchSource
    examples: Sequence[Example]
    num_rows: int
    digests: Mapping[str, str]
    notes: Sequence[str]


class Method:
    """A method of training for one run: fine-tuning, and the base of the others."""

    def __init__(self, config: TrainConfig, base: BaseModel) -> None:
        self._config, self._base = config, base

    def data(self) -> TrainingData:
        """Reads the files of the run and checks all of their data rows.

        Raises ConfigError, which names the file and row, if a file cannot be read, or a row cannot be learned.
        """
        split = load_split(self._config, self._config.data.train, self._base)
        return _data(GivenBatches(split), split)

    def validation(self) -> Split:
        """Reads the files of held-out rows; raises ConfigError as `data` does."""
        return load_split(self._config, self._config.data.validation, self._base, is_validation=True)

    def objective(self, progress: ProgressDisplay) -> tuple[Objective, Values]:
        """Returns the objective, and weights of its own that a step must find in `frozen`."""
        del progress
        return CrossEntropy(), {}


class _Preferences(Method):
    def objective(self, progress: ProgressDisplay) -> tuple[Objective, Values]:
        del progress
        names = {field.name for field in dataclasses.fields(DPO)}
        given = self._config.training.trainer_kwargs.items()
        return DPO(**{name: value for name, value in given if name in names}), {}


class _Rewards(Method):
    def data(self) -> TrainingData:
        rollouts, digests = load_rollouts(self._config, self._base)
        return TrainingData(rollouts, [], rollouts.num_rows, digests, [])

    def objective(self, progress: ProgressDisplay) -> tuple[Objective, Values]:
        del progress
        return grpo_of(self._config.training), {}


class _Distillation(Method):
    def __init__(self, config: TrainConfig, base: BaseModel) -> None:
        super().__init__(config, base)
        self._teacher = open_teacher(config, base)

    def data(self) -> TrainingData:
        return _data(*load_distillation(self._config, self._base))

    def validation(self) -> Split:
        return load_held_out(self._config, self._base)

    def objective(self, progress: ProgressDisplay) -> tuple[Objective, Values]:
        return distillation_of(self._config, self._base, self._teacher, progress)


def method_of(config: TrainConfig, base: BaseModel) -> Method:
    """Makes the method of a run. Raises ConfigError if another model that it needs cannot be used."""
    return METHODS[config.training.trainer_type](config, base)


def _data(source: BatchSource, split: Split) -> TrainingData:
    return TrainingData(source, split.examples, len(split.rows), split.digests, split.notes)


METHODS: Mapping[str, type[Method]] = {
    SFT_TYPE: Method,
    DPO_TYPE: _Preferences,
    GRPO_TYPE: _Rewards,
    DISTILLATION: _Distillation,
}
