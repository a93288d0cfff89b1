"""GRPO's loss, and the difference between log-probabilities in training and in sampling."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np

from jaxis.kernels.sampling import TokenFilters
from jaxis.training.batches import TrainingBatch
from jaxis.training.config import CORRECT, TrainingParams
from jaxis.training.functional_model import Values
from jaxis.training.objectives import Draws, Forward, Losses, Reported

MISMATCH = "sampler_trainer_logprob_diff_max"
VOCAB_MISMATCH = "sampler_trainer_logprob_diff_vocab_max"
MAX_WEIGHT = 2.0


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RolloutBatch(TrainingBatch):
    """A batch of sampled answers.

    Attributes:
      sampled_logprobs: float32 [M, B, L], log-probability of each target when the engine sampled it; 0 where the target
        is not learned.
      advantages: float32 [M, B, L], advantage of the answer that the target belongs to.
      vocab_positions: int32 [M, N], positions of tokens, counted through the batch rows of a micro-batch.
      vocab_logprobs: float32 [M, N, V], the engine's log-probabilities of all next tokens at these positions.
      temperature: float32 [M], temperature of the sampling.
      top_k: int32 [M]; `top_k`, `top_p` and `min_p` are as in `TokenFilters`.
      top_p: float32 [M].
      min_p: float32 [M].
    """

    sampled_logprobs: np.ndarray | jax.Array
    advantages: np.ndarray | jax.Array
    vocab_positions: np.ndarray | jax.Array
    vocab_logprobs: np.ndarray | jax.Array
    temperature: np.ndarray | jax.Array
    top_k: np.ndarray | jax.Array
    top_p: np.ndarray | jax.Array
    min_p: np.ndarray | jax.Array


def grpo_of(params: TrainingParams) -> GRPO:
    return GRPO(corrects=params.on_mismatch == CORRECT, has_filters=params.grpo.has_filters)


@dataclass(frozen=True)
class GRPO:
    """Minus the advantage of each sampled token, with the derivative of its log-probability.

    The weight is the number of tokens of the whole batch ("dapo", arXiv:2503.14476). Each batch has one update, so the
    ratio to the policy that sampled is 1.

    Attributes:
      corrects: True to weigh a token by the ratio of its probabilities in training and in sampling, up to MAX_WEIGHT.
      has_filters: True if some tokens could not be sampled.
    """

    corrects: bool
    has_filters: bool

    def weight(self, batch: TrainingBatch) -> jax.Array:
        return jnp.sum(batch.learned, dtype=jnp.float32)

    def loss(self, forward: Forward, values: Values, frozen: Values, batch: TrainingBatch, key: jax.Array) -> Losses:
        del frozen
        rollouts = cast(RolloutBatch, batch)
        rows = TrainingBatch(**{field.name: getattr(batch, field.name) for field in dataclasses.fields(TrainingBatch)})
        filters = TokenFilters(*map(jnp.asarray, (rollouts.top_k, rollouts.top_p, rollouts.min_p)))
        draws = Draws(jnp.asarray(rollouts.temperature), filters if self.has_filters else None)
        scores = forward(values, rows, key, draws)
        logprobs = scores.logprobs
        now = jax.lax.stop_gradient(logprobs)
        change = jnp.where(batch.learned, now - rollouts.sampled_logprobs, 0.0)
        weights = jnp.minimum(jnp.exp(change), MAX_WEIGHT) if self.corrects else 1.0
        gains = weights * rollouts.advantages * jnp.exp(logprobs - now)
        total = -jnp.sum(jnp.where(batch.learned, gains, 0.0))
        maxima = {MISMATCH: jnp.max(jnp.abs(change))}
        if rollouts.vocab_positions.size:
            sampled = jnp.asarray(rollouts.vocab_logprobs)
            here = jax.lax.stop_gradient(scores.vocab_logprobs(jnp.asarray(rollouts.vocab_positions)))
            # Also for tokens that both exclude.
            maxima[VOCAB_MISMATCH] = jnp.max(jnp.where(here == sampled, 0.0, jnp.abs(here - sampled)))
        return Losses(total, Reported(maxima=maxima), scores.router_sums)
