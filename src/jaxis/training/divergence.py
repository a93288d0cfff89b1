"""Distillation's loss: the divergence of the student's distributions of next tokens from the teacher's."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxis.host.progress import ProgressDisplay
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
            chunk_tokens=CHUNK_TOKENS // 4,
        )
        return Losses(jnp.sum(divergences), Reported(), student.router_sums)

    def _scaled(self, logits: jax.Array) -> jax.Array:
        return logits[:, : self.size] / self.temperature


TILE = 4096


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
    """Goes through the vocabulary in tiles, and writes the derivatives over the logits."""
    # A normalizer near 0 rounds little.
    student, teacher = (logits - jnp.max(logits, axis=1, keepdims=True) for logits in (student, teacher))
    normalizers = logsumexp(student)[:, None], logsumexp(teacher)[:, None]
    tile_size = min(TILE, student.shape[1])
    num_tiles, num_others = divmod(student.shape[1], tile_size)

    def terms(student: jax.Array, teacher: jax.Array) -> _Terms:
        return _terms(student - normalizers[0], teacher - normalizers[1], beta)

    def tile(logits: jax.Array, number: jax.Array) -> jax.Array:
        return jax.lax.dynamic_slice_in_dim(logits, number * tile_size, tile_size, axis=1)

    def add(number: jax.Array, sums: jax.Array) -> jax.Array:
        return sums + _sums(terms(tile(student, number), tile(teacher, number)), beta)

    values, mean = sums = jax.lax.fori_loop(0, num_tiles, add, jnp.zeros((2, len(student)), jnp.float32))
    if num_others:
        values, mean = sums + _sums(terms(student[:, -num_others:], teacher[:, -num_others:]), beta)

    def replace(number: jax.Array, logits: jax.Array) -> jax.Array:
        slopes = _slopes(terms(tile(logits, number), tile(teacher, number)), mean, beta)
        return jax.lax.dynamic_update_slice_in_dim(logits, slopes, number * tile_size, axis=1)

    slopes = jax.lax.fori_loop(0, num_tiles, replace, student)
    if num_others:
        last = _slopes(terms(slopes[:, -num_others:], teacher[:, -num_others:]), mean, beta)
        slopes = slopes.at[:, -num_others:].set(last)
    return values, slopes


class _Terms(NamedTuple):
    """Terms of some tokens, all [C, N].

    Attributes:
      p: Probability of the student.
      q: Probability of the teacher.
      ours: Logarithm of p / m, or without a mixture of p / q.
      theirs: Logarithm of q / m, or without a mixture of q / p.
    """

    p: jax.Array
    q: jax.Array
    ours: jax.Array
    theirs: jax.Array


def _terms(student: jax.Array, teacher: jax.Array, beta: float) -> _Terms:
    """Computes the terms of two arrays of log-probabilities [C, N]."""
    # A token that neither has would be -inf - -inf.
    change = jnp.where(student == teacher, 0.0, student - teacher)
    p, q = jnp.exp(student), jnp.exp(teacher)
    if beta in (0, 1):
        return _Terms(p, q, change, -change)
    # The mixture beside the larger of the two: no exponential overflows.
    rest = jnp.log1p(jnp.where(change > 0, beta, 1 - beta) * jnp.expm1(-jnp.abs(change)))
    return _Terms(p, q, -rest - jax.nn.relu(-change), -rest - jax.nn.relu(change))


def _sums(terms: _Terms, beta: float) -> jax.Array:
    """Returns sums over tokens, float32 [2, C]: the divergence, and the mean of `ours` under the student."""
    p, q, ours, theirs = terms
    if beta == 0:
        values = _divergences(q, p, theirs)
    elif beta == 1:
        values = _divergences(p, q, ours)
    else:
        m = (1 - beta) * p + beta * q
        values = beta * _divergences(q, m, theirs) + (1 - beta) * _divergences(p, m, ours)
    return jnp.stack([jnp.sum(values, axis=1), jnp.sum(_product(p, ours), axis=1)])


def _slopes(terms: _Terms, mean: jax.Array, beta: float) -> jax.Array:
    """Returns the derivatives of the divergence by the student's logits, float32 [C, N]."""
    p, q, ours, _ = terms
    if beta == 0:
        return p - q
    return (1.0 if beta == 1 else 1 - beta) * (_product(p, ours) - p * mean[:, None])


def _divergences(a: jax.Array, b: jax.Array, ratio: jax.Array) -> jax.Array:
    """Computes the terms of KL(a || b) for probabilities [C, N] with ratio = log(a / b).

    The terms of the sum of b - a, which is 0, are added. No term is then below 0, so that rounding cancels nothing.
    """
    rest = jnp.where(ratio < -1, b - a, a * jnp.expm1(-jnp.maximum(ratio, -1)))
    return _product(a, ratio) + rest


def _product(probabilities: jax.Array, ratio: jax.Array) -> jax.Array:
    return jnp.where(probabilities > 0, probabilities * ratio, 0.0)


def _forward(student: jax.Array, teacher: jax.Array, beta: float) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
    values, slopes = _divergence(student, teacher, beta)
    return (values, slopes), slopes


def _backward(beta: float, slopes: jax.Array, by_results: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
    del beta
    return slopes * by_results[0][:, None], None


divergence.defvjp(_forward, _backward)
