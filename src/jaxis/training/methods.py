"""The data and the objective of each trainer type."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from jaxis.host.progress import ProgressDisplay
from jaxis.training.base_model import BaseModel
from jaxis.training.batch_source import BatchSource, GivenBatches
from jaxis.training.config import DISTILLATION, TrainConfig, TrainingParams
from jaxis.training.config import DPO as DPO_TYPE
from jaxis.training.config import GRPO as GRPO_TYPE
from jaxis.training.config import SFT as SFT_TYPE
from jaxis.training.data import Split, load_split
from jaxis.training.distillation.data import load_distillation, load_held_out
from jaxis.training.distillation.objective import distillation_of
from jaxis.training.examples import Example
from jaxis.training.functional_model import Values
from jaxis.training.grpo.data import load_rollouts
from jaxis.training.grpo.objective import grpo_of
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


def load_data(config: TrainConfig, base: BaseModel) -> TrainingData:
    """Reads the files of a run and checks all of their data rows.

    Raises ConfigError, which names the file and line, if a file cannot be read, or a data row cannot be learned.
    """
    if config.training.trainer_type == GRPO_TYPE:
        rollouts, digests = load_rollouts(config, base)
        return TrainingData(rollouts, [], rollouts.num_rows, digests, [])
    if config.training.trainer_type == DISTILLATION:
        source, split = load_distillation(config, base)
    else:
        split = load_split(config, config.data.train, base)
        source = GivenBatches(split)
    return TrainingData(source, split.examples, len(split.rows), split.digests, split.notes)


def load_validation(config: TrainConfig, base: BaseModel) -> Split:
    """Reads the files of held-out rows; raises ConfigError as `load_data` does."""
    if config.training.trainer_type == DISTILLATION:
        return load_held_out(config, base)
    return load_split(config, config.data.validation, base, is_validation=True)


def load_objective(config: TrainConfig, base: BaseModel, progress: ProgressDisplay) -> tuple[Objective, Values]:
    """Returns the objective, and weights of its own that a step must find in `frozen`."""
    if config.training.trainer_type == DISTILLATION:
        return distillation_of(config, base, progress)
    return make_objective(config.training), {}


def make_objective(params: TrainingParams) -> Objective:
    """Returns an objective that has no weights of its own."""
    return _OBJECTIVES[params.trainer_type](params)


def _dpo(params: TrainingParams) -> DPO:
    names = {field.name for field in dataclasses.fields(DPO)}
    return DPO(**{name: value for name, value in params.trainer_kwargs.items() if name in names})


_OBJECTIVES: dict[str, Callable[[TrainingParams], Objective]] = {
    SFT_TYPE: lambda _: CrossEntropy(),
    DPO_TYPE: _dpo,
    GRPO_TYPE: grpo_of,
}
