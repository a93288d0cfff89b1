"""The data rows of a distillation: answers that are given, and prompts that the student answers."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxis.errors import ConfigError, RequestError
from jaxis.training.base_model import BaseModel
from jaxis.training.batch_source import BatchSource, GivenBatches
from jaxis.training.batches import BatchShape
from jaxis.training.config import TrainConfig
from jaxis.training.data import Split, load_split
from jaxis.training.distillation.student_answers import StudentAnswers
from jaxis.training.distillation.teacher_prompts import TaughtBatches, rows_of_teacher, taught
from jaxis.training.examples import Encoded, Example
from jaxis.training.held_out_prompts import HeldOutPrompts
from jaxis.training.rows import DataRow, of_each, with_answer


def load_distillation(config: TrainConfig, base: BaseModel) -> tuple[BatchSource, Split]:
    """Returns the batch source of a run, and its data.

    Raises ConfigError if a file cannot be read, a row has no prompt where the student answers, or the configuration is
    not supported.
    """
    params, data = config.training.distillation, config.data.train
    if params.lmbda == 1:
        encoder = _PromptEncoder(_Prompts(config, base))
        split = load_split(config, data, base, prepare=with_answer, encoder=encoder)
        prompts = [example.ids.tolist() for example in split.examples]
        teachers = _Prompts(config, base).of_teacher(split)
    else:
        split = load_split(config, data, base, prepare=_with_given_answer)
        teachers = _Prompts(config, base).of_teacher(split)
        if not params.lmbda and teachers is None:
            return GivenBatches(split), split
        prompts = _Prompts(config, base).of_student(split)
        if teachers is not None:
            _pairs(split, prompts, teachers)
    for name, is_set in {"fsdp.enable_fsdp": config.fsdp.enable_fsdp, "data.train.pack": data.pack}.items():
        if is_set:
            raise ConfigError(
                f"{name} cannot be honoured where answers are sampled or the teacher has prompts of its own: leave it "
                "out"
            )
    return StudentAnswers(config, base, split, prompts, teachers), split


def load_held_out(config: TrainConfig, base: BaseModel) -> Split:
    """Returns the validation data, with the teacher's prompts. Raises ConfigError as `load_distillation` does."""
    split = load_split(config, config.data.validation, base, is_validation=True)
    prompts = _Prompts(config, base)
    if (teachers := prompts.of_teacher(split)) is None:
        return split
    examples, theirs = zip(*_pairs(split, prompts.of_student(split), teachers), strict=True)
    shape = BatchShape(1, config.training.per_device_eval_batch_size, max(len(each.ids) for each in examples + theirs))
    return dataclasses.replace(split, batches=TaughtBatches(examples, theirs, shape))


class _Prompts:
    """Prompts of the student and the teacher, which leave room for an answer of the student.

    Raises ConfigError if a row has no prompt, or one that is too long.
    """

    def __init__(self, config: TrainConfig, base: BaseModel) -> None:
        self._base, self._params = base, config.training.distillation
        context = config.model.model_max_length or base.context
        self._longest = context - (self._params.max_completion_length if self._params.lmbda else 1)

    def encode(self, rows: Sequence[DataRow]) -> list[list[int]]:
        """Returns the token ids of what is before the last answer of each row."""
        return HeldOutPrompts(rows, self._base.tokenizer, self._base.template, self._longest).ids

    def of_student(self, split: Split) -> list[list[int]]:
        """Returns the prompt of each example."""
        return self._of_examples(split, split.rows)

    def of_teacher(self, split: Split) -> list[list[int]] | None:
        """Returns the teacher's prompt of each example; None: the student's."""
        rows = rows_of_teacher(split.rows, self._params.teacher_prompt_template)
        return None if rows is None else self._of_examples(split, rows)

    def _of_examples(self, split: Split, rows: Sequence[DataRow]) -> list[list[int]]:
        of_rows = dict(zip((row.where for row in rows), self.encode(rows), strict=True))
        return [of_rows[example.where] for example in split.examples]


@dataclass(frozen=True)
class _PromptEncoder:
    """Encoder of rows as examples of their prompts, of which nothing is learned."""

    prompts: _Prompts

    def encode(self, rows: Sequence[DataRow], encoded: Encoded | None = None) -> Encoded:
        encoded = Encoded([]) if encoded is None else encoded
        for ids, row in zip(self.prompts.encode(rows), rows, strict=True):
            encoded.examples.append(Example(np.asarray(ids, np.int32), np.zeros(len(ids), bool), row.where))
        return encoded


def _pairs(split: Split, prompts: Sequence[list[int]], teachers: Sequence[list[int]]) -> list[tuple[Example, Example]]:
    """Returns each example and that of the teacher. Raises ConfigError, which names the row, if there is none."""
    found = zip(split.examples, prompts, teachers, strict=True)
    return of_each(found, lambda each: taught(*each), where=lambda each: each[0].where)


def _with_given_answer(row: Mapping[str, Any]) -> Mapping[str, Any]:
    if row.get("prompt") is not None and not row.keys() & {"completion", "messages", "chosen"}:
        raise RequestError(
            "has a prompt alone: set training.distillation.lmbda to 1, with which the student answers all rows, or "
            "give a completion"
        )
    return row
