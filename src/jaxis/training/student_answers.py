"""Distillation's batches: rows that are given, and prompts that the student answers."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxis.errors import ConfigError, RequestError
from jaxis.outputs import CompletionOutput
from jaxis.sampling_params import SamplingParams
from jaxis.training.answers import HeldOutPrompts, LiveEngine, answer_seed
from jaxis.training.base_model import BaseModel
from jaxis.training.batches import Batches, BatchShape, TrainingBatch
from jaxis.training.config import TrainConfig
from jaxis.training.data import BatchSource, GivenBatches, Split, StepContext, load_split
from jaxis.training.examples import Encoded, Example
from jaxis.training.rows import DataRow, of_each, with_answer
from jaxis.training.teacher import TaughtBatches, rows_of_teacher, taught


class StudentAnswers(GivenBatches):
    """Batches in which the student answers a share of the prompts when a step begins.

    For given weights, answers and the choice of answered prompts depend on the seed and the step only.

    Args:
      prompts: Token ids of the prompt of each example.
      teachers: Token ids of the teacher's prompts; None: the same.
    """

    def __init__(
        self,
        config: TrainConfig,
        base: BaseModel,
        split: Split,
        prompts: Sequence[list[int]],
        teachers: Sequence[list[int]] | None,
    ) -> None:
        super().__init__(split)
        training, self._params = config.training, config.training.distillation
        self._prompts, self._teachers, self._seed = prompts, teachers, training.data_seed
        max_tokens = max(map(len, prompts)) + self._params.max_completion_length
        more = 0
        for number, (ids, example) in enumerate(zip(prompts, split.examples, strict=True)):
            base.check_ids(ids, example.where)
            if teachers is not None:
                base.check_ids(teachers[number], example.where)
                more = max(more, len(teachers[number]) - len(ids))
        longest = more + max(max_tokens, *(len(example.ids) for example in split.examples))
        self._shape = BatchShape(training.gradient_accumulation_steps, training.per_device_train_batch_size, longest)
        self._engine = LiveEngine(base, max_tokens)

    def draw(self, context: StepContext) -> tuple[TrainingBatch, Mapping[str, float]]:
        # NumPy guarantees the stream of this generator, whatever its version.
        places = [place for [place] in self.split.batches.rows(context.step)]
        is_sampled = np.random.RandomState([self._seed, context.step]).random_sample(len(places)) < self._params.lmbda
        numbers = np.flatnonzero(is_sampled).tolist()
        answers = self._answers(context, {number: self._prompts[places[number]] for number in numbers})
        examples = [self.split.examples[place] for place in places]
        for number, answer in answers.items():
            examples[number] = self._example(places[number], answer)
            if self._params.log_completions:
                line = {"step": context.step + 1, "row": examples[number].where, "answer": answer.text}
                context.write_answer(line)
        measured: dict[str, float] = {"sampled": len(numbers) / len(places)}
        if answers:
            measured["completion_length"] = float(np.mean([len(each.token_ids) for each in answers.values()]))
            measured["completions_cut"] = float(np.mean([each.finish_reason == "length" for each in answers.values()]))
        return self._batch(places, examples), measured

    def close(self) -> None:
        self._engine.close()

    def _batch(self, places: Sequence[int], examples: Sequence[Example]) -> TrainingBatch:
        if (teachers := self._teachers) is None:
            return Batches([(example,) for example in examples], self._shape, seed=None).batch(0)
        pairs = [taught(each, self._prompts[i], teachers[i]) for i, each in zip(places, examples, strict=True)]
        own, theirs = zip(*pairs, strict=True)
        return TaughtBatches(own, theirs, self._shape).batch(0)

    def _answers(self, context: StepContext, prompts: Mapping[int, list[int]]) -> dict[int, CompletionOutput]:
        """Answers prompts, given by their number in the step, with the current weights."""
        if not prompts:
            return {}
        sampling = [
            SamplingParams(
                temperature=self._params.temperature,
                seed=answer_seed([self._seed, context.step, number]),
                max_tokens=self._params.max_completion_length,
            )
            for number in prompts
        ]
        found = self._engine.answers(context.model(), list(prompts.values()), sampling, context.progress)
        return dict(zip(prompts, found, strict=True))

    def _example(self, place: int, answer: CompletionOutput) -> Example:
        prompt, sampled = self._prompts[place], answer.token_ids
        learned = np.arange(len(prompt) + len(sampled)) >= len(prompt)
        return Example(np.asarray([*prompt, *sampled], np.int32), learned, self.split.examples[place].where)


def load_distillation(config: TrainConfig, base: BaseModel) -> BatchSource:
    """Returns the batch source of a run.

    Raises ConfigError if a file cannot be read, a row has no prompt where the student answers, or the configuration is
    not supported.
    """
    params, data, of_rows = config.training.distillation, config.data.train, _Prompts(config, base)
    if params.lmbda == 1:
        split = load_split(config, data, base, prepare=with_answer, encode=of_rows.add)
        prompts, teachers = [example.ids.tolist() for example in split.examples], of_rows.of_teacher(split)
    else:
        split = load_split(config, data, base, prepare=_with_given_answer)
        teachers = of_rows.of_teacher(split)
        if not params.lmbda and teachers is None:
            return GivenBatches(split)
        prompts = of_rows.of_student(split)
        if teachers is not None:
            _pairs(split, prompts, teachers)
    for name, is_set in {"fsdp.enable_fsdp": config.fsdp.enable_fsdp, "data.train.pack": data.pack}.items():
        if is_set:
            raise ConfigError(
                f"{name} cannot be honoured where answers are sampled or the teacher has prompts of its own: leave it "
                "out"
            )
    return StudentAnswers(config, base, split, prompts, teachers)


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

    def add(self, rows: Sequence[DataRow], encoded: Encoded) -> None:
        """Adds rows as examples of their prompts, of which nothing is learned."""
        for ids, row in zip(self.encode(rows), rows, strict=True):
            encoded.examples.append(Example(np.asarray(ids, np.int32), np.zeros(len(ids), bool), row.where))

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
