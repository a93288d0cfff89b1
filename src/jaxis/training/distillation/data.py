"""The data rows of a distillation: answers that are given, and prompts that the student answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxis.errors import ConfigError, RequestError
from jaxis.training.base_model import BaseModel
from jaxis.training.batch_source import BatchSource, GivenBatches
from jaxis.training.config import TrainConfig
from jaxis.training.data import Split, load_split
from jaxis.training.distillation.student_answers import StudentAnswers
from jaxis.training.distillation.teacher import open_teacher
from jaxis.training.examples import Encoded, Example
from jaxis.training.grpo.data import with_answer
from jaxis.training.held_out_prompts import HeldOutPrompts
from jaxis.training.rows import DataRow


def load_distillation(config: TrainConfig, base: BaseModel) -> tuple[BatchSource, Split]:
    """Returns the batch source of a run, and its data.

    Raises ConfigError if a file cannot be read, a row has no prompt where the student answers, or the configuration is
    not supported.
    """
    open_teacher(config, base)
    params, data = config.training.distillation, config.data.train
    if not params.lmbda:
        return GivenBatches(split := load_split(config, data, base, prepare=_with_given_answer)), split
    for name, is_set in {"fsdp.enable_fsdp": config.fsdp.enable_fsdp, "data.train.pack": data.pack}.items():
        if is_set:
            raise ConfigError(f"{name} cannot be honoured where answers are sampled: leave it out, or set lmbda to 0")
    encoder = PromptEncoder(config, base)
    if params.lmbda == 1:
        split = load_split(config, data, base, prepare=with_answer, encoder=encoder)
        prompts = [example.ids.tolist() for example in split.examples]
    else:
        split = load_split(config, data, base, prepare=_with_given_answer)
        of_rows = dict(zip((row.where for row in split.rows), encoder.prompts(split.rows).ids, strict=True))
        prompts = [of_rows[example.where] for example in split.examples]
    return StudentAnswers(config, base, split, prompts), split


class PromptEncoder:
    """Encoder of what is before a data row's last answer, leaving room for an answer of the student."""

    def __init__(self, config: TrainConfig, base: BaseModel) -> None:
        self._base = base
        context = config.model.model_max_length or base.context
        self._longest = context - config.training.distillation.max_completion_length

    def prompts(self, rows: Sequence[DataRow]) -> HeldOutPrompts:
        """Raises ConfigError if a row has no prompt, or one that is too long."""
        return HeldOutPrompts(rows, self._base.tokenizer, self._base.template, self._longest)

    def encode(self, rows: Sequence[DataRow], encoded: Encoded | None = None) -> Encoded:
        """Adds an example of each prompt, of which nothing is learned."""
        encoded = Encoded([]) if encoded is None else encoded
        for ids, row in zip(self.prompts(rows).ids, rows, strict=True):
            encoded.examples.append(Example(np.asarray(ids, np.int32), np.zeros(len(ids), bool), row.where))
        return encoded


def _with_given_answer(row: Mapping[str, Any]) -> Mapping[str, Any]:
    if row.get("prompt") is not None and not row.keys() & {"completion", "messages", "chosen"}:
        raise RequestError(
            "has a prompt alone: set training.distillation.lmbda to 1, with which the student answers all rows, or "
            "give a completion"
        )
    return row
