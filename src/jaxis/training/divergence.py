"""Distillation's loss: the divergence of the student's distributions of next tokens from the teacher's."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxis.host.progress import ProgressDisplay
from jaxis.kernels.platform import target_platform
from jaxis.kernels.sampling import logsumexp
from jaxis.training.base_model import BaseModel
from jaxis.training.batches import TrainingBatch
from jaxis.training.config import TrainConfig
from jaxis.training.functional_model import Values
from jaxis.training.objectives import Losses, Reported
from jaxis.training.scores import CHUNK_TOKENS, Forward, in_chunks
from jaxis.training.teacher import TaughtBatch, load_teacher, vocabulary_size

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
            chunk_tokens=CHUNK_TOKENS // 2,
        )
        return Losses(jnp.sum(divergences), Reported(), student.router_sums)

    def _scaled(self, logits: jax.Array) -> jax.Array:
        return logits[:, : self.size] / self.temperature


_NEAR = 0.125


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def divergence(student: jax.Array, teacher: jax.Array, beta: float) -> tuple[jax.Array, jax.Array]:
    """Computes the divergence of each row of logits [C, V] of the student from the teacher's, both float32.

    With the mixture m = (1 - beta) student + beta teacher it is beta KL(teacher || m) + (1 - beta) KL(student || m)
    (arXiv:2306.13649, equation 1); for beta = 0, KL(teacher || student); for beta = 1, KL(student || teacher). Equal
    logits have exactly 0, and so have their derivatives.

    Returns the divergence, float32 [C], which is differentiable by the student's logits, and these derivatives
    themselves, float32 [C, V].
    """
    return _divergence(student, teacher, beta)


def _divergence(student: jax.Array, teacher: jax.Array, beta: float) -> tuple[jax.Array, jax.Array]:
    """Goes through the rows, on CPU one by one: what a row is made of stays in a core's cache."""

    def of_row(logits: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        # A normalizer near 0 rounds little.
        ours, theirs = (each - jnp.max(each) for each in logits)
        values, slopes, p = _terms(ours - logsumexp(ours[None]), theirs - logsumexp(theirs[None]), beta)
        if beta:
            slopes = (1.0 if beta == 1 else 1 - beta) * (slopes - p * jnp.sum(slopes))
        return jnp.sum(values), slopes

    rows_at_once = None if target_platform() == "cpu" else len(student)
    return jax.lax.map(of_row, (student, teacher), batch_size=rows_at_once)


class _Terms(NamedTuple):
    """Terms of some tokens, all [N].

    Attributes:
      values: Terms of the divergence. None is below 0, so that rounding cancels nothing.
      slopes: Derivatives by the student's logits for beta = 0; otherwise p log(p / m), without a mixture p log(p / q).
      p: Probability of the student.
    """

    values: jax.Array
    slopes: jax.Array
    p: jax.Array


def _terms(student: jax.Array, teacher: jax.Array, beta: float) -> _Terms:
    """Computes the terms of two arrays of log-probabilities [N].

    A term of KL(a || b) is a log(a / b) + b - a: sums of b - a are 0.
    """
    # A token that neither has would be -inf - -inf.
    change = jnp.where(student == teacher, 0.0, student - teacher)
    is_more = change > 0
    # Beside the larger of the two, no exponential overflows.
    large, small = jnp.exp(jnp.maximum(student, teacher)), jnp.exp(jnp.minimum(student, teacher))
    fall = -jnp.abs(change)
    rest = jnp.expm1(fall)
    p, q = jnp.where(is_more, large, small), jnp.where(is_more, small, large)
    small_by_fall = jnp.where(small > 0, small * fall, 0.0)
    if beta in (0, 1):
        of_small, of_large = small_by_fall - large * rest, large * (rest - fall)
        values = jnp.where(is_more == (beta == 0), of_small, of_large)
        return _Terms(values, p - q if beta == 0 else jnp.where(is_more, -large * fall, small_by_fall), p)
    share = jnp.where(is_more, beta, 1 - beta)  # of the smaller one in the mixture
    log_mixture = jnp.log1p(share * rest)  # less that of the larger one
    small_by_log = small_by_fall - small * log_mixture
    of_large = _excess(share * rest, share * rest - log_mixture)
    over_small = -(1 - share) * rest / (1 + rest)  # the mixture, less the smaller one, over that
    of_small = jnp.where(
        over_small < _NEAR, small * _excess(over_small, 0.0), small_by_log - (1 - share) * large * rest
    )
    values = (1 - share) * large * of_large + share * of_small
    return _Terms(values, jnp.where(is_more, -large * log_mixture, small_by_log), p)


def _excess(x: jax.Array, far: jax.Array | float) -> jax.Array:
    """Computes x - log(1 + x) near 0, where the difference would be rounded; `far` is the result elsewhere."""
    series = jnp.zeros_like(x)
    for power in range(9, 1, -1):
        series = (-1.0) ** power / power + x * series
    return jnp.where(jnp.abs(x) < _NEAR, x * x * series, far)


def _forward(student: jax.Array, teacher: jax.Array, beta: float) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
    values, slopes = _divergence(student, teacher, beta)
    return (values, slopes), slopes


def _backward(beta: float, slopes: jax.Array, by_results: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
    del beta
    return slopes * by_results[0][:, None], None


divergence.defvjp(_forward, _backward)
