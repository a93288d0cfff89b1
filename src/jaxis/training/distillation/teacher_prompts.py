"""A teacher that reads more than the student: another prompt before the same answer (self-distillation).

The names are those of TRL's trainer for self-distillation (SDFT, arXiv:2601.19897).
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jaxis.errors import RequestError
from jaxis.jsonl.conversation import Role
from jaxis.training.batches import Batches, BatchShape, TrainingBatch
from jaxis.training.config import TEACHER_PROMPT
from jaxis.training.examples import Example
from jaxis.training.rows import DataRow, Dialogue, Text, of_each

CONTEXT = "privileged_context"


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TaughtBatch(TrainingBatch):
    """A batch of one sequence a batch row, of which only a last answer is learned.

    Attributes:
      teacher: The same answers after the teacher's prompts.
    """

    teacher: TrainingBatch

    def places(self) -> jax.Array:
        """Returns the place in the teacher's micro-batch of each learned token, int32 [B * L]; other values are any."""
        num_rows, num_tokens = self.teacher.ids.shape
        ahead = self.teacher.seq_lens[:, :1] - self.seq_lens[:, :1]
        columns = np.arange(self.ids.shape[1]) + ahead
        return (jax.numpy.clip(columns, 0, num_tokens - 1) + num_tokens * np.arange(num_rows)[:, None]).reshape(-1)


class TaughtBatches(Batches):
    """Batches of examples with those of the teacher, in the given order; both end with the same answers."""

    def __init__(self, examples: Sequence[Example], teachers: Sequence[Example], shape: BatchShape) -> None:
        super().__init__([(each,) for each in examples], shape, seed=None)
        self._teacher = Batches([(each,) for each in teachers], shape, seed=None)

    def batch(self, step: int) -> TaughtBatch:
        return TaughtBatch(**super().batch(step).arrays(), teacher=self._teacher.batch(step))


def taught(example: Example, prompt: Sequence[int], teacher_prompt: Sequence[int]) -> tuple[Example, Example]:
    """Returns an example of which only what follows the prompt is learned, and the same answer for the teacher.

    Raises RequestError if the example does not begin with the prompt.
    """
    start = len(prompt)
    if example.ids[:start].tolist() != list(prompt):
        raise RequestError(
            "its answer does not follow its prompt as the chat template opens an answer, so that the teacher's prompt "
            "cannot stand before it: set training.distillation.lmbda to 1, or give model.chat_template"
        )
    learned = example.learned & (np.arange(len(example.ids)) >= start)
    ids = np.concatenate([np.asarray(teacher_prompt, np.int32), example.ids[start:]])
    return Example(example.ids, learned, example.where), Example(ids, np.zeros(len(ids), bool), example.where)


def rows_of_teacher(rows: Sequence[DataRow], template: str | None) -> list[DataRow] | None:
    """Returns the data rows with the teacher's prompts; None: the teacher reads what the student does.

    Raises ConfigError, which names the first such row, if a row lacks what the template asks for.
    """
    if template is None and not any(row.columns.get(CONTEXT) is not None for row in rows):
        return None
    return of_each(rows, lambda row: _of_teacher(row, template or TEACHER_PROMPT))


def _of_teacher(row: DataRow, template: str) -> DataRow:
    context = row.columns.get(CONTEXT)
    if f"{{{CONTEXT}}}" in template and not isinstance(context, str):
        raise RequestError(f"has no string {CONTEXT}, which the teacher's prompt is made of: give one, or an empty one")

    def filled(prompt: Any) -> str:
        if not isinstance(prompt, str):
            raise RequestError("has a prompt that is no string, which a teacher's prompt cannot be made of")
        values = {"prompt": prompt, CONTEXT: context}
        return re.sub(r"\{(prompt|" + CONTEXT + r")\}", lambda match: values[match[1]] or "", template)

    content = row.content
    if isinstance(content, Text):
        return dataclasses.replace(row, content=Text(filled(content.prompt), content.completion))
    if not isinstance(content, Dialogue):
        raise RequestError("has two answers, which a teacher cannot be asked about")
    messages = list(content.messages)
    answer = max(i for i, message in enumerate(messages) if message["role"] == Role.ASSISTANT)
    asked = [i for i, message in enumerate(messages[:answer]) if message["role"] == Role.USER]
    if not asked:
        raise RequestError("has no message of the user, which the teacher's prompt is made of")
    messages[asked[-1]] = {**messages[asked[-1]], "content": filled(messages[asked[-1]].get("content"))}
    return dataclasses.replace(row, content=dataclasses.replace(content, messages=messages))
