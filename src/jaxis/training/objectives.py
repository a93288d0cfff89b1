"""Objectives of training: the loss of learned tokens, DPO's of preferred answers, and GRPO's of rewarded ones."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, cast

import jax
import jax.numpy as jnp
import numpy as np

from jaxis.kernels.sampling import TokenFilters
from jaxis.training.batches import TrainingBatch
from jaxis.training.config.methods import CORRECT
from jaxis.training.config.training import TrainingParams
from jaxis.training.functional_model import RouterSums, Values
from jaxis.training.scores import Draws, Forward
from jaxis.training.sharding import Devices

Scalars = dict[str, jax.Array]
"""float32 scalars by name."""


class Mean(NamedTuple):
    """Sum and number of values, float32 scalars."""

    total: jax.Array
    count: jax.Array

    @classmethod
    def of(cls, values: jax.Array, counted: jax.Array) -> Mean:
        """Makes the mean of those values, bool or float32 [...], that are counted, bool [...]."""
        return cls(jnp.sum(jnp.where(counted, values, 0), dtype=jnp.float32), jnp.sum(counted, dtype=jnp.float32))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Reported:
    """Values of a micro-batch that are reported, beside its loss.

    `sums` are added up over micro-batches and devices, to be divided by the weight. Of `maxima`, which are at least 0,
    the largest is kept. `means` have divisors of their own.
    """

    sums: Scalars = field(default_factory=dict[str, jax.Array])
    maxima: Scalars = field(default_factory=dict[str, jax.Array])
    means: dict[str, Mean] = field(default_factory=dict[str, Mean])

    def joined(self, other: Reported) -> Reported:
        """Returns the values of both."""
        return Reported(
            jax.tree.map(jnp.add, self.sums, other.sums),
            jax.tree.map(jnp.maximum, self.maxima, other.maxima),
            jax.tree.map(jnp.add, self.means, other.means),
        )

    def of_all(self, devices: Devices) -> Reported:
        """Returns the values of all devices, within a function of `Devices.on_each`."""
        return Reported(devices.sum(self.sums), devices.maximum(self.maxima), devices.sum(self.means))

    def divided(self, weight: jax.Array) -> Scalars:
        """Returns the sums divided by the weight of the batch, the maxima and the means."""
        means = {name: mean.total / jnp.maximum(mean.count, 1.0) for name, mean in self.means.items()}
        return {name: value / weight for name, value in self.sums.items()} | self.maxima | means


class Losses(NamedTuple):
    """Sum of the losses of a micro-batch, to be divided by the weight, and reported values.

    `router_sums` are those of the trained model; see `Scores`.
    """

    total: jax.Array
    reported: Reported
    router_sums: RouterSums | None


class Objective(Protocol):
    """Objective of training: the sum of `loss` over micro-batches, divided by the `weight` of all of them together."""

    def weight(self, batch: TrainingBatch) -> jax.Array:
        """Returns the divisor of the summed losses, for a batch or for one of its micro-batches."""
        ...

    def loss(self, forward: Forward, values: Values, frozen: Values, batch: TrainingBatch, key: jax.Array) -> Losses:
        """Computes the losses of a micro-batch, with its random key.

        `frozen` has weights that are not trained and, if the objective needs them, the others as they were before
        training.
        """
        ...


@dataclass(frozen=True)
class CrossEntropy:
    """Negative log-probability of learned tokens, in nats. The weight is the number of learned tokens."""

    def weight(self, batch: TrainingBatch) -> jax.Array:
        return jnp.sum(batch.learned, dtype=jnp.float32)

    def loss(self, forward: Forward, values: Values, frozen: Values, batch: TrainingBatch, key: jax.Array) -> Losses:
        del frozen
        scores = forward(values, batch, key)
        sums = {"accuracy": jnp.sum(scores.hits, dtype=jnp.float32)}
        return Losses(-jnp.sum(scores.logprobs), Reported(sums), scores.router_sums)


@dataclass(frozen=True)
class DPO:
    """Direct preference optimization (arXiv:2305.18290). The weight is the number of pairs.

    The reference is the model before training.

    Attributes:
      beta: Strength of the tie to the reference; a larger value keeps the model closer.
      label_smoothing: Assumed share of pairs in the wrong order (conservative DPO).
      loss_type: sigmoid, hinge (SLiC, arXiv:2305.10425) or ipo (arXiv:2310.12036), of the mean over an answer's tokens.
    """

    beta: float = 0.1
    label_smoothing: float = 0.0
    loss_type: str = "sigmoid"

    def weight(self, batch: TrainingBatch) -> jax.Array:
        return jnp.sum(batch.num_sequences, dtype=jnp.float32) / 2

    def loss(self, forward: Forward, values: Values, frozen: Values, batch: TrainingBatch, key: jax.Array) -> Losses:
        reference = forward.fixed(frozen, batch, key).logprobs
        scores = forward(values, batch, key)
        changes = jnp.sum(scores.logprobs - reference, axis=-1)
        num_pairs = len(changes) // 2
        chosen, rejected = self.beta * changes[:num_pairs], self.beta * changes[num_pairs:]
        is_pair = jnp.asarray(batch.num_sequences)[:num_pairs] > 0
        if self.loss_type == "ipo":
            means = changes / jnp.maximum(jnp.sum(jnp.asarray(batch.learned), axis=-1), 1)
            losses = jnp.square(means[:num_pairs] - means[num_pairs:] - 1 / (2 * self.beta))
        elif self.loss_type == "hinge":
            losses = jax.nn.relu(1 - (chosen - rejected))
        else:
            losses = sigmoid_losses(chosen - rejected, self.label_smoothing)
        return Losses(*_sums_of_pairs(losses, chosen, rejected, is_pair), scores.router_sums)


def sigmoid_losses(margin: jax.Array, label_smoothing: float = 0.0) -> jax.Array:
    """Computes DPO's standard losses of pairs [N] from the differences (margin) of their rewards; see `DPO`."""
    return -(1 - label_smoothing) * jax.nn.log_sigmoid(margin) - label_smoothing * jax.nn.log_sigmoid(-margin)


def _sums_of_pairs(
    losses: jax.Array, chosen: jax.Array, rejected: jax.Array, is_pair: jax.Array
) -> tuple[jax.Array, Reported]:
    """Sums losses float32 [N] and reported values over pairs; `is_pair` is False for padding, bool [N].

    The rewards of chosen and rejected answers, float32 [N], are beta times the logarithm of how much more likely these
    are than under the reference.
    """
    margin = chosen - rejected

    def total(each: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(is_pair, each, 0.0), dtype=jnp.float32)

    sums = {
        "rewards/chosen": total(chosen),
        "rewards/rejected": total(rejected),
        "rewards/margins": total(margin),
        "rewards/accuracies": total(margin > 0),
    }
    return total(losses), Reported(sums)


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
