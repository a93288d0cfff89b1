"""Distillation's loss: the divergence of the student's distributions of next tokens from the teacher's."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxis.host.progress import ProgressDisplay
from jaxis.training.base_model import BaseModel
from jaxis.training.batches import TrainingBatch
from jaxis.training.config import TrainConfig
from jaxis.training.distillation.divergence import divergence
from jaxis.training.distillation.teacher import load_teacher, vocabulary_size
from jaxis.training.distillation.teacher_prompts import TaughtBatch
from jaxis.training.functional_model import Values
from jaxis.training.objectives import CHUNK_TOKENS, Forward, Losses, Reported, in_chunks

_TEACHER = "teacher "


def distillation_of(
    config: TrainConfig, base: BaseModel, teacher: BaseModel | None, progress: ProgressDisplay
) -> tuple[Distillation, Values]:
    """Loads the teacher, from `open_teacher`.

    Returns the objective, and the teacher's weights, which it looks for in `frozen`.
    """
    params = config.training.distillation
    if teacher is None:
        return Distillation(params.beta, params.temperature), {}
    forward, weights = load_teacher(config, teacher, progress)
    size = min(map(vocabulary_size, (base, teacher)))
    named = {f"{_TEACHER}{name}": value for name, value in weights.items()}
    return Distillation(params.beta, params.temperature, forward, size), named


@dataclass(frozen=True)
class Distillation:
    """Divergence of the student from the teacher at each learned token (arXiv:2306.13649), in nats.

    The weight is the number of learned tokens.

    Attributes:
      beta: Kind of divergence; see `divergence`.
      temperature: Divisor of the logits of both.
      teacher: Forward pass of the teacher, whose weights are in `frozen`; None: the model as it was before training.
      size: Number of logits that count; None: all.
    """

    beta: float
    temperature: float = 1.0
    teacher: Forward | None = None
    size: int | None = None

    def weight(self, batch: TrainingBatch) -> jax.Array:
        return jnp.sum(batch.learned, dtype=jnp.float32)

    def loss(self, forward: Forward, values: Values, frozen: Values, batch: TrainingBatch, key: jax.Array) -> Losses:
        student = forward.states(values, batch, key)
        rows = batch.teacher if isinstance(batch, TaughtBatch) else batch
        if self.teacher is None:
            teacher = forward.states(frozen, rows, key)
        else:
            weights = {name.removeprefix(_TEACHER): v for name, v in frozen.items() if name.startswith(_TEACHER)}
            teacher = self.teacher.states(weights, rows, key)
        theirs = jax.lax.stop_gradient(teacher.hidden)
        if isinstance(batch, TaughtBatch):
            theirs = theirs[batch.places()]

        def of_chunk(logits: jax.Array, hidden: jax.Array) -> tuple[jax.Array, jax.Array]:
            return divergence(logits, self._scaled(teacher.head(hidden)), self.beta)

        [divergences] = in_chunks(
            *(of_chunk, lambda hidden: self._scaled(student.head(hidden)), student.hidden),
            *(jnp.asarray(batch.learned).reshape(-1), theirs),
            head_is_frozen=student.head_is_frozen,
            # Two models' logits need no more memory than one's in fine-tuning.
            chunk_tokens=CHUNK_TOKENS // 4,
        )
        return Losses(jnp.sum(divergences), Reported(), student.router_sums)

    def _scaled(self, logits: jax.Array) -> jax.Array:
        return logits[:, : self.size] / self.temperature
