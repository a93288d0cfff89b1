"""The methods of training, one for each trainer type: where its batches come from, and its objective."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from jaxis.host.progress import ProgressDisplay
from jaxis.training.base_model import BaseModel
from jaxis.training.batch_source import BatchSource, GivenBatches
from jaxis.training.config import DISTILLATION, TrainConfig
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


@dataclass(frozen=True)
class Method:
    """A method of training.

    Attributes:
      objective: Makes the objective, which may load weights of its own that a step must find in `frozen`.
      data: Reads the files of a run and checks all of their data rows.
      validation: Reads the files of held-out rows.

    The last two raise ConfigError, which names the file and line, if a file cannot be read, or a row cannot be learned.
    """

    objective: Callable[[TrainConfig, BaseModel, ProgressDisplay], tuple[Objective, Values]]
    data: Callable[[TrainConfig, BaseModel], TrainingData]
    validation: Callable[[TrainConfig, BaseModel], Split]


def method_of(config: TrainConfig) -> Method:
    return METHODS[config.training.trainer_type]


def _given(config: TrainConfig, base: BaseModel) -> TrainingData:
    split = load_split(config, config.data.train, base)
    return _data(GivenBatches(split), split)


def _held_out(config: TrainConfig, base: BaseModel) -> Split:
    return load_split(config, config.data.validation, base, is_validation=True)


def _sampled(config: TrainConfig, base: BaseModel) -> TrainingData:
    rollouts, digests = load_rollouts(config, base)
    return TrainingData(rollouts, [], rollouts.num_rows, digests, [])


def _distilled(config: TrainConfig, base: BaseModel) -> TrainingData:
    return _data(*load_distillation(config, base))


def _data(source: BatchSource, split: Split) -> TrainingData:
    return TrainingData(source, split.examples, len(split.rows), split.digests, split.notes)


def _dpo(config: TrainConfig) -> DPO:
    names = {field.name for field in dataclasses.fields(DPO)}
    return DPO(**{name: value for name, value in config.training.trainer_kwargs.items() if name in names})


METHODS: Mapping[str, Method] = {
    SFT_TYPE: Method(lambda *_: (CrossEntropy(), {}), _given, _held_out),
    DPO_TYPE: Method(lambda config, *_: (_dpo(config), {}), _given, _held_out),
    GRPO_TYPE: Method(lambda config, *_: (grpo_of(config.training), {}), _sampled, _held_out),
    DISTILLATION: Method(distillation_of, _distilled, load_held_out),
}
