"""Distillation's teacher: another model, or the student itself, which may read more (self-distillation).

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

from jaxis.errors import CheckpointError, ConfigError, RequestError
from jaxis.host.byte_size import human_bytes
from jaxis.host.machine import free_host_bytes
from jaxis.host.progress import ProgressDisplay
from jaxis.jsonl.conversation import Role
from jaxis.layers.attention_metadata import ScratchCache
from jaxis.training.base_model import BaseModel, open_base_model
from jaxis.training.batches import Batches, BatchShape, TrainingBatch
from jaxis.training.config import TrainConfig
from jaxis.training.config.methods import TEACHER_PROMPT
from jaxis.training.config.training import ENGINE
from jaxis.training.examples import Example
from jaxis.training.forward_pass import BLOCK_SIZE
from jaxis.training.functional_model import FunctionalModel, Values, bytes_of, values_of
from jaxis.training.rows import DataRow, Dialogue, Text, of_each
from jaxis.training.scores import Forward, make_forward

_KEY = "training.distillation.teacher_model_name_or_path"


def open_teacher(config: TrainConfig, student: BaseModel) -> BaseModel | None:
    """Finds the teacher and reads all its files except the weights; None: the student itself is the teacher.

    Raises ConfigError if there is no such model, it has another vocabulary, or its weights do not fit into memory.
    """
    params = config.training.distillation
    if params.teacher_model_name_or_path is None:
        return None
    name = params.teacher_model_name_or_path
    if config.fsdp.enable_fsdp:
        raise ConfigError(f"fsdp.enable_fsdp cannot be honoured with {_KEY}: leave one of them out")
    model = dataclasses.replace(
        config.model,
        **{"model_name": name, "model_revision": params.teacher_model_revision, "model_max_length": None},
        **{"model_kwargs": {}, "load_pretrained_weights": True, "chat_template": None, "chat_template_kwargs": None},
    )
    try:
        teacher = open_base_model(dataclasses.replace(config, model=model))
    except (ConfigError, CheckpointError) as error:
        raise ConfigError(f"{_KEY}={name!r}: {error}") from None
    teacher = dataclasses.replace(teacher, quantization=None)
    _check_vocabulary(teacher, student)
    needed = bytes_of(values_of(teacher.abstract(teacher.compute_dtype)))
    there = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit") or free_host_bytes()
    if needed > there:
        raise ConfigError(
            f"{_KEY}={name!r} needs {human_bytes(needed)} for its weights, and {human_bytes(there)} are free: give a "
            "smaller teacher, or a quantized one"
        )
    return teacher


def load_teacher(config: TrainConfig, teacher: BaseModel, progress: ProgressDisplay) -> tuple[Forward, Values]:
    """Loads the teacher; returns its forward pass, of the same kind as the student's, and its weights."""
    is_engine = config.training.forward_pass == ENGINE
    model = teacher.load(teacher.compute_dtype, progress, packed=is_engine)
    functional = FunctionalModel(model)
    scratch = ScratchCache(BLOCK_SIZE, jax.numpy.dtype(teacher.compute_dtype)) if is_engine else None
    return make_forward(functional, lambda values, _: functional.bind(values), scratch=scratch), values_of(model)


def vocabulary_size(model: BaseModel) -> int:
    """Returns the number of a model's logits; some, at the end, may belong to no token."""
    return int(model.hf_config.get_text_config().get("vocab_size") or len(model.tokenizer.vocabulary))


def _check_vocabulary(teacher: BaseModel, student: BaseModel) -> None:
    """Raises ConfigError unless every token has the same id for both, and a logit of both."""
    ours, theirs = student.tokenizer.vocabulary, teacher.tokenizer.vocabulary
    if ours != theirs:
        token = min(token for token, _ in ours.items() ^ theirs.items())
        raise ConfigError(
            f"{_KEY}={teacher.name!r} has another vocabulary than {student.name}: the id of token {token!r} is "
            f"{theirs.get(token)} for the teacher, and {ours.get(token)} for the student: give a teacher with the "
            "student's tokenizer"
        )
    sizes = vocabulary_size(student), vocabulary_size(teacher)
    if sizes[0] != sizes[1] and min(sizes) <= max(ours.values()):
        raise ConfigError(
            f"{_KEY}={teacher.name!r} has {sizes[1]} logits, and {student.name} {sizes[0]}, of a tokenizer with ids up "
            f"to {max(ours.values())}: give a teacher with a logit for each token"
        )


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
