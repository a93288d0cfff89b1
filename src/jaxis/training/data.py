"""The data of a run: from the files that its configuration names to the batch of each step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jaxis.errors import ConfigError
from jaxis.training.base_model import BaseModel
from jaxis.training.batches import Batches, BatchShape
from jaxis.training.config import DPO, SplitParams, TrainConfig
from jaxis.training.examples import Example, ExampleEncoder, check_kind
from jaxis.training.rows import DataRow, read_rows


@dataclass(frozen=True)
class Split:
    """Training or validation data.

    Attributes:
      examples: Two for each row of preferences.
      batches: Their batches.
      digests: Path of each file -> the digest of what is in it.
      notes: What a user may not expect.
    """

    examples: Sequence[Example]
    batches: Batches
    digests: dict[str, str]
    notes: list[str]


def load_split(config: TrainConfig, split: SplitParams, base: BaseModel, *, is_validation: bool = False) -> Split:
    """Reads files, and checks all of their rows.

    Args:
      config: The run.
      split: Which files.
      base: The model, for its tokenizer and its context.
      is_validation: Whether batches are of one micro-batch, in the order of the files.

    Raises:
      ConfigError: A file cannot be read, or a row of one cannot be learned; the error names it.
    """
    training, wants_pairs = config.training, config.training.trainer_type == DPO
    if wants_pairs and split.pack:
        raise ConfigError(f"{split.section()}.pack: preferences are not packed; leave it out")
    rows: list[DataRow] = []
    digests: dict[str, str] = {}
    for dataset in split.datasets:
        seed = next(s for s in (dataset.seed, split.seed, training.data_seed) if s is not None)
        of_file, digests[str(dataset.path)] = read_rows(dataset, seed)
        rows += of_file
    check_kind(rows, training.trainer_type, wants_pairs=wants_pairs)
    max_tokens = config.model.model_max_length or base.context
    encoded = ExampleEncoder(base.tokenizer, base.template, split.train_target, max_tokens).encode(rows)
    examples = encoded.examples
    longest = max(len(example.ids) for example in examples)
    row_tokens = max_tokens if split.pack and config.model.model_max_length else min(max_tokens, max(longest, 64))
    items = list(zip(examples[::2], examples[1::2], strict=True)) if wants_pairs else [(each,) for each in examples]
    if is_validation:
        shape, seed = BatchShape(1, training.per_device_eval_batch_size, row_tokens), None
    else:
        accumulated = training.gradient_accumulation_steps
        shape = BatchShape(accumulated, training.per_device_train_batch_size, row_tokens)
        seed = training.data_seed if split.seed is None else split.seed
    return Split(examples, Batches(items, shape, seed=seed, packs=split.pack), digests, encoded.notes(max_tokens))


def num_steps(config: TrainConfig, batches: Batches) -> int:
    """Steps of the whole training."""
    if config.training.max_steps > 0:
        return config.training.max_steps
    return config.training.num_train_epochs * batches.steps_per_epoch
