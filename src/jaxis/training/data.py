"""The data of a run: sources of batches, and the rows of files as examples (`Split`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxis.errors import ConfigError
from jaxis.host.progress import ProgressDisplay
from jaxis.layers.module import JaxModule
from jaxis.training.base_model import BaseModel
from jaxis.training.batches import Batches, BatchShape, Mixture, TrainingBatch
from jaxis.training.config import TrainConfig
from jaxis.training.config.data import FIRST_EXHAUSTED, SplitParams
from jaxis.training.config.training import DPO
from jaxis.training.examples import Encoded, Example, ExampleEncoder, check_kind
from jaxis.training.rows import DataRow, read_rows
from jaxis.training.sharding import Devices


@dataclass(frozen=True)
class StepContext:
    """The state of a run just before the step with number `step`, from 0.

    `model` returns the model with the current weights, and `write_answer` writes a line of answers.jsonl.
    """

    step: int
    model: Callable[[], JaxModule]
    write_answer: Callable[[dict[str, Any]], None]
    progress: ProgressDisplay


@dataclass(frozen=True)
class Split:
    """Training or validation data.

    Attributes:
      rows: Data rows of the files.
      examples: Examples; two for each data row of preferences.
      digests: Digest of each file's content, by path.
      notes: Lines about things that a user may not expect.
    """

    rows: Sequence[DataRow]
    examples: Sequence[Example]
    batches: Batches
    digests: dict[str, str]
    notes: list[str]
    devices: Devices

    def placed(self, batch: TrainingBatch) -> TrainingBatch:
        return self.devices.put_batch(batch, self.batches.num_sides)


class BatchSource:
    """Source of the batches of a run.

    Attributes:
      shown: Names of reported values that printed lines show beside the loss.
      examples: Examples from files; none if they are generated during training.
      num_rows: Number of data rows; of streamed ones, those that were drawn.
      digests: Digest of each file's content, by path.
      notes: Lines about things that a user may not expect.
    """

    shown: Sequence[str] = ()
    examples: Sequence[Example] = ()
    num_rows: int
    digests: Mapping[str, str]
    notes: Sequence[str] = ()

    @property
    def steps_per_epoch(self) -> int:
        """Number of steps that use every data row once."""
        raise NotImplementedError

    def draw(self, context: StepContext) -> tuple[TrainingBatch, Mapping[str, float]]:
        """Returns the batch of a step and the values to report about it."""
        raise NotImplementedError

    def place(self) -> Mapping[str, Any]:
        """Returns the place in the files that a resumed run reads on from; nothing if a step's number tells it."""
        return {}

    def go_to(self, place: Mapping[str, Any]) -> None:
        """Goes to a place from `place`."""

    def check(self, step: int, values: Mapping[str, float]) -> None:
        """Raises EngineError if the values that a step (from 1) reported must end the run."""

    def summary(self) -> Sequence[str]:
        """Returns lines for the user at the end of a run."""
        return ()

    def close(self) -> None:
        """Frees what batches are drawn by."""


class GivenBatches(BatchSource):
    """Source of batches that come from data files."""

    def __init__(self, split: Split) -> None:
        self.split, self.examples, self.num_rows = split, split.examples, len(split.rows)
        self.digests, self.notes = split.digests, split.notes

    @property
    def steps_per_epoch(self) -> int:
        return self.split.batches.steps_per_epoch

    def draw(self, context: StepContext) -> tuple[TrainingBatch, Mapping[str, float]]:
        return self.split.placed(self.split.batches.batch(context.step)), {}


def read_datasets(
    config: TrainConfig, split: SplitParams, prepare: Callable[[Mapping[str, Any]], Mapping[str, Any]] = dict
) -> Iterator[tuple[list[DataRow], dict[str, str]]]:
    """Reads the rows of each data set, and the digests of its files; arguments and errors as of `load_split`."""
    for dataset in split.datasets:
        seed = next(s for s in (dataset.seed, split.seed, config.training.data_seed) if s is not None)
        yield read_rows(dataset, seed, prepare)


def load_split(
    config: TrainConfig,
    split: SplitParams,
    base: BaseModel,
    *,
    is_validation: bool = False,
    prepare: Callable[[Mapping[str, Any]], Mapping[str, Any]] = dict,
    encode: Callable[[Sequence[DataRow], Encoded], Any] | None = None,
) -> Split:
    """Reads files for a model and checks all of their data rows.

    For validation, batches have one micro-batch, in the order of the files. `prepare` is applied to each raw row;
    `encode`, by default that of an `ExampleEncoder`, adds examples of rows. Raises ConfigError, which names
    the file and row, if a file cannot be read, or a data row cannot be learned.
    """
    training, wants_pairs = config.training, config.training.trainer_type == DPO
    if wants_pairs and split.pack:
        raise ConfigError(f"{split.section()}.pack: preferences are not packed; leave it out")
    encoder, max_tokens = encoder_of(config, base, split)
    encode = encode or encoder.encode
    rows: list[DataRow] = []
    digests: dict[str, str] = {}
    encoded, sizes = Encoded([]), []
    for found, of_files in read_datasets(config, split, prepare):
        digests |= of_files
        check_kind(found, training.trainer_type, wants_pairs=wants_pairs)
        rows += found
        before = len(encoded.examples)
        encode(found, encoded)
        for example in encoded.examples[before:]:
            base.check_ids(example.ids, example.where)
        sizes.append((len(encoded.examples) - before) // (2 if wants_pairs else 1))
    examples = encoded.examples
    longest = max(len(example.ids) for example in examples)
    if split.pack:
        longest = max_tokens if config.model.model_max_length else max(longest, 64)
    row_tokens = min(max_tokens, longest)
    sides = (examples[::2], examples[1::2]) if wants_pairs else (examples,)
    if is_validation:
        shape, seed = BatchShape(1, base.devices.num_ranks * training.per_device_eval_batch_size, row_tokens), None
    else:
        shape = training_shape(config, base, row_tokens)
        seed = training.data_seed if split.seed is None else split.seed
    mixture = _mixture(split, sizes, 0 if seed is None else seed)
    batches = Batches(
        list(zip(*sides, strict=True)),
        shape,
        seed=seed,
        packs=split.pack,
        mixture=mixture,
        own_rows=base.devices.own_rows(shape.num_rows),
    )
    return Split(rows, examples, batches, digests, encoded.notes(max_tokens), base.devices)


def encoder_of(config: TrainConfig, base: BaseModel, split: SplitParams) -> tuple[ExampleEncoder, int]:
    """Returns the encoder of a split's rows, and the length to which it cuts examples."""
    max_tokens = config.model.model_max_length or base.context
    return ExampleEncoder(base.tokenizer, base.template, split.train_target, max_tokens), max_tokens


def training_shape(config: TrainConfig, base: BaseModel, row_tokens: int) -> BatchShape:
    """Returns the size of a step's batch, with rows of up to `row_tokens`."""
    num_rows = base.devices.num_ranks * config.training.per_device_train_batch_size
    return BatchShape(config.training.gradient_accumulation_steps, num_rows, row_tokens)


def _mixture(split: SplitParams, sizes: Sequence[int], seed: int) -> Mixture | None:
    proportions = [each.mixture_proportion for each in split.datasets if each.mixture_proportion is not None]
    if not proportions:
        return None
    return Mixture(sizes, proportions, stops_at_first=split.mixture_strategy == FIRST_EXHAUSTED, seed=seed)


def num_steps(config: TrainConfig, steps_per_epoch: int) -> int:
    """Returns the number of steps of the whole training."""
    if config.training.max_steps > 0:
        return config.training.max_steps
    return config.training.num_train_epochs * steps_per_epoch
