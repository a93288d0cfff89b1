"""GRPO's loss, and the difference between log-probabilities in training and in sampling."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np

from jaxis.kernels.sampling import TokenFilters
from jaxis.training.batches import TrainingBatch
from jaxis.training.config.methods import CORRECT
from jaxis.training.config.training import TrainingParams
from jaxis.training.functional_model import Values
from jaxis.training.objectives import Draws, Forward, Losses, Mean, Reported

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
      is_first: float32 [M], 1 in the first step that learns from these answers, 0 in later ones.
    """

    sampled_logprobs: np.ndarray | jax.Array
    advantages: np.ndarray | jax.Array
    vocab_positions: np.ndarray | jax.Array
    vocab_logprobs: np.ndarray | jax.Array
    temperature: np.ndarray | jax.Array
    top_k: np.ndarray | jax.Array
    top_p: np.ndarray | jax.Array
    min_p: np.ndarray | jax.Array
    is_first: np.ndarray | jax.Array


def grpo_of(params: TrainingParams) -> GRPO:
    grpo = params.grpo
    return GRPO(
        corrects=params.on_mismatch == CORRECT,
        has_filters=grpo.has_filters,
        loss_type=grpo.loss_type,
        max_completion_length=grpo.max_completion_length,
        has_several_steps=grpo.num_iterations > 1,
        clips_at=(1 - grpo.epsilon, 1 + (grpo.epsilon if grpo.epsilon_high is None else grpo.epsilon_high)),
        is_of_answers=grpo.importance_sampling_level == "sequence",
        beta=grpo.beta,
    )


@dataclass(frozen=True)
class GRPO:
    """Minus the advantage of each sampled token times the ratio of its probabilities now and when it was sampled.

    If each batch has one step, the ratio is 1 and only has derivatives. Losses are those of TRL's GRPOTrainer; reported
    values are means of the whole batch, where TRL has means of its micro-batches. Each batch row has one answer.

    Attributes:
      corrects: True to weigh a token by the ratio of its probabilities in training and in sampling, up to MAX_WEIGHT;
        not for several steps.
      has_filters: True if some tokens could not be sampled.
      loss_type: Kind of mean over tokens; see `GrpoParams`.
      max_completion_length: Limit of an answer's tokens, the divisor of "dr_grpo".
      has_several_steps: True if later steps learn from the same answers. Ratios are then not 1, and are clipped.
      clips_at: Bounds beyond which a ratio is clipped.
      is_of_answers: True for one ratio of an answer, the geometric mean of those of its tokens.
      beta: Factor of the KL divergence from the model before training.
    """

    corrects: bool
    has_filters: bool
    loss_type: str = "dapo"
    max_completion_length: int = 1
    has_several_steps: bool = False
    clips_at: tuple[float, float] = (0.8, 1.2)
    is_of_answers: bool = False
    beta: float = 0.0

    def weight(self, batch: TrainingBatch) -> jax.Array:
        if self.loss_type == "dapo":
            return jnp.sum(batch.learned, dtype=jnp.float32)
        if self.loss_type == "bnpo":
            return jnp.float32(len(batch.ids) if batch.ids.ndim == 3 else 1)  # micro-batches
        num_answers = jnp.sum(batch.num_sequences, dtype=jnp.float32)
        return num_answers * self.max_completion_length if self.loss_type == "dr_grpo" else num_answers

    def loss(self, forward: Forward, values: Values, frozen: Values, batch: TrainingBatch, key: jax.Array) -> Losses:
        rollouts = cast(RolloutBatch, batch)
        rows = TrainingBatch(**batch.arrays())
        filters = TokenFilters(*map(jnp.asarray, (rollouts.top_k, rollouts.top_p, rollouts.min_p)))
        draws = Draws(jnp.asarray(rollouts.temperature), filters if self.has_filters else None)
        scores = forward(values, rows, key, draws)
        learned, num_tokens = jnp.asarray(batch.learned), jnp.sum(batch.learned, axis=-1, keepdims=True)
        now = jax.lax.stop_gradient(scores.logprobs)
        change = jnp.where(learned, now - rollouts.sampled_logprobs, 0.0)
        before = jnp.asarray(rollouts.sampled_logprobs) if self.has_several_steps else now
        log_ratios = jnp.where(learned, scores.logprobs - before, 0.0)
        if self.is_of_answers:
            log_ratios = jnp.sum(log_ratios, axis=-1, keepdims=True) / jnp.maximum(num_tokens, 1)
        gains, means = self._gains(jnp.exp(log_ratios), jnp.asarray(rollouts.advantages), learned)
        if self.corrects and not self.has_several_steps:
            gains *= jnp.minimum(jnp.exp(change), MAX_WEIGHT)
        if self.beta:
            reference = forward.fixed(frozen, rows, key, draws).logprobs
            divergence = jnp.exp(reference - scores.logprobs) - (reference - scores.logprobs) - 1
            gains -= self.beta * divergence
            means["kl"] = Mean.of(divergence, learned)
        losses = jnp.where(learned, -gains, 0.0)
        if self.loss_type == "grpo":
            losses /= jnp.maximum(num_tokens, 1)
        total = jnp.sum(losses)
        if self.loss_type == "bnpo":
            total /= jnp.maximum(jnp.sum(num_tokens), 1)
        # Later steps have other weights than those that sampled.
        maxima = {MISMATCH: jnp.max(jnp.abs(change)) * rollouts.is_first}
        if rollouts.vocab_positions.size:
            sampled = jnp.asarray(rollouts.vocab_logprobs)
            here = jax.lax.stop_gradient(scores.vocab_logprobs(jnp.asarray(rollouts.vocab_positions)))
            # Also for tokens that both exclude.
            differences = jnp.where(here == sampled, 0.0, jnp.abs(here - sampled))
            maxima[VOCAB_MISMATCH] = jnp.max(differences) * rollouts.is_first
        return Losses(total, Reported(maxima=maxima, means=means), scores.router_sums)

    def _gains(self, ratios: jax.Array, advantages: jax.Array, learned: jax.Array) -> tuple[jax.Array, dict[str, Mean]]:
        """Returns the products of ratios [B, L or 1] and advantages [B, L], clipped, and the shares that were."""
        if not self.has_several_steps:
            return ratios * advantages, {}
        low, high = self.clips_at
        gains = jnp.minimum(ratios * advantages, jnp.clip(ratios, low, high) * advantages)
        is_low, is_high = (ratios < low) & (advantages < 0), (ratios > high) & (advantages > 0)
        shares = {"low_mean": is_low, "high_mean": is_high, "region_mean": is_low | is_high}
        if self.is_of_answers:
            shares = {name: jnp.any(share, axis=-1) for name, share in shares.items()}
            learned = jnp.any(learned, axis=-1)
        return gains, {f"clip_ratio/{name}": Mean.of(share, learned) for name, share in shares.items()}
