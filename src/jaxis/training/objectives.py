"""What is minimized: the loss of learned tokens, and DPO's of preferred answers.

Both consist of the log-probabilities of learned tokens. These are computed for a few rows at a time, so that logits of
all tokens are never in memory, and only for chunks that have learned tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol, cast

import jax
import jax.numpy as jnp

from jaxis.engine.execution.model_arrays import GenerativeModel
from jaxis.kernels.sampling import TokenFilters, logsumexp, tempered, weights_of
from jaxis.layers.attention_metadata import ScratchCache
from jaxis.layers.module import JaxModule
from jaxis.training.batches import TrainingBatch
from jaxis.training.functional_model import FunctionalModel, Values, hidden_states
from jaxis.training.layer_calls import LayerCalls, RouterSums

CHUNK_TOKENS = 256
_ROWS = "rows"

Sums = dict[str, jax.Array]
"""What is added up over the micro-batches of a step, float32 scalars by name."""
MAXIMUM = "_max"
"""What the names of those end with of which the largest is taken instead."""


class Scores(NamedTuple):
    """What a model makes of a micro-batch.

    Attributes:
      logprobs: float32 [B, L], of each token, the log-probability of the next one, where it is learned, else 0.
      hits: bool [B, L], whether that is the most likely one.
      router_sums: What routers did; None if they are not observed.
      vocab_logprobs: (positions int32 [N], counted through all rows) -> float32 [N, V], the log-probabilities of all
        tokens there.
    """

    logprobs: jax.Array
    hits: jax.Array
    router_sums: RouterSums | None
    vocab_logprobs: Callable[[jax.Array], jax.Array]


class Losses(NamedTuple):
    """What an objective makes of a micro-batch.

    Attributes:
      total: The sum of losses.
      sums: What is reported of it, as sums to be divided by the weight.
      router_sums: See `Scores`; of the model that is trained.
    """

    total: jax.Array
    sums: Sums
    router_sums: RouterSums | None


class Draws(NamedTuple):
    """From what a model's distribution becomes the tokens of a micro-batch were drawn.

    Attributes:
      temperature: float32 scalar, which logits are divided by.
      filters: Of scalars; None keeps every token.
    """

    temperature: jax.Array
    filters: TokenFilters | None

    def logits(self, logits: jax.Array) -> jax.Array:
        """The logits that were drawn from, as the sampler has them: float32 [R, V] -> [R, V], -inf where filtered."""
        temperature = jnp.full(len(logits), self.temperature)
        divided = tempered(logits, temperature)
        if self.filters is None:
            return divided
        filters = TokenFilters(*(jnp.full(len(logits), each) for each in self.filters))
        # Which tokens are kept is not differentiated.
        fixed = jax.lax.stop_gradient(logits)
        cutoff = weights_of(fixed, temperature, filters).cutoff
        assert cutoff is not None
        return jnp.where(fixed >= cutoff[:, None], divided, -jnp.inf)


class Forward(Protocol):
    """A model as objectives see it."""

    def __call__(self, values: Values, batch: TrainingBatch, key: jax.Array, draws: Draws | None = None) -> Scores:
        """Scores a micro-batch, by the model's own distribution or by what tokens were drawn from."""
        ...


def token_logprobs(
    compute_logits: Callable[[jax.Array], jax.Array],
    hidden: jax.Array,
    targets: jax.Array,
    learned: jax.Array,
    *,
    head_is_frozen: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """The log-probabilities of targets.

    Args:
      compute_logits: Hidden states [N, E] to logits, float32 [N, V].
      hidden: [N, E].
      targets: int32 [N].
      learned: bool [N].
      head_is_frozen: Whether derivatives are those by hidden states alone. They are then computed along with the
        log-probabilities, and otherwise later, by computing logits again.

    Returns:
      float32 [N], the target's log-probability where it is learned, else 0; and bool [N], whether it has the largest
      logit.
    """
    size = len(targets)
    chunk_size = min(CHUNK_TOKENS, size)
    num_chunks = -(-size // chunk_size)
    # Learned tokens come first, so that as few chunks as possible have some.
    order = jnp.argsort(~learned, stable=True)
    padded = jnp.concatenate([order, jnp.zeros(num_chunks * chunk_size - size, order.dtype)])
    is_real = jnp.arange(len(padded)) < size

    def scores_of(logits: jax.Array, wanted: jax.Array, counts: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        chosen = jnp.take_along_axis(logits, wanted[:, None], axis=-1)[:, 0]
        # As the sampler has it.
        normalizers = logsumexp(logits)
        hits = (jnp.argmax(logits, axis=-1) == wanted) & counts
        return jnp.where(counts, chosen - normalizers, 0.0), hits, normalizers

    def score(rows: jax.Array, wanted: jax.Array, counts: jax.Array) -> tuple[jax.Array, jax.Array]:
        return scores_of(compute_logits(rows), wanted, counts)[:2]

    def score_and_derive(rows: jax.Array, wanted: jax.Array, counts: jax.Array) -> tuple[jax.Array, ...]:
        logits, derive = jax.vjp(compute_logits, rows)
        logprobs, hits, normalizers = scores_of(logits, wanted, counts)
        # The derivative by logits in one pass, which can overwrite them.
        probabilities = jnp.exp(logits - normalizers[:, None])
        by_logits = (jnp.arange(logits.shape[-1]) == wanted[:, None]) - probabilities
        return logprobs, hits, derive(jnp.where(counts[:, None], by_logits, 0.0))[0]

    def of_chunk(rows: jax.Array, wanted: jax.Array, counts: jax.Array) -> tuple[jax.Array, ...]:
        function = score_and_derive if head_is_frozen else score

        def skip(*arguments: jax.Array) -> tuple[jax.Array, ...]:
            return jax.tree.map(lambda each: jnp.zeros(each.shape, each.dtype), jax.eval_shape(function, *arguments))

        return jax.lax.cond(jnp.any(counts), function, skip, rows, wanted, counts)

    chunks = (num_chunks, chunk_size)
    counted = (learned[padded] & is_real).reshape(chunks)
    rows = hidden[padded].reshape(*chunks, -1)
    if head_is_frozen:
        fixed = jax.lax.stop_gradient(rows)
        logprobs, hits, slopes = jax.lax.map(
            lambda each: of_chunk(*each), (fixed, targets[padded].reshape(chunks), counted)
        )
        # Adds zeros, whose derivatives are those of the log-probabilities: each depends on its own row alone.
        logprobs += jnp.sum(slopes.astype(jnp.float32) * (rows - fixed).astype(jnp.float32), axis=-1)
    else:
        again = jax.checkpoint(of_chunk)
        logprobs, hits = jax.lax.map(lambda each: again(*each), (rows, targets[padded].reshape(chunks), counted))
    # Back to the order of the tokens.
    places = jnp.where(is_real, padded, size)
    return (
        jnp.zeros(size, jnp.float32).at[places].set(logprobs.reshape(-1), mode="drop"),
        jnp.zeros(size, bool).at[places].set(hits.reshape(-1), mode="drop"),
    )


def make_forward(
    model: FunctionalModel,
    bound: Callable[[Values, jax.Array], JaxModule],
    *,
    recompute: bool = False,
    observes_routers: bool = False,
    head_is_frozen: bool = False,
    scratch: ScratchCache | None = None,
) -> Forward:
    """The scores of a micro-batch.

    Args:
      model: The model.
      bound: (its weights, the random key of a row) -> the model with these.
      recompute: Whether layers are computed again for their derivatives.
      observes_routers: Whether there are `router_sums`.
      head_is_frozen: See `token_logprobs`.
      scratch: See `hidden_states`.
    """

    is_mapped = not model.has_experts and scratch is None

    def forward(values: Values, batch: TrainingBatch, key: jax.Array, draws: Draws | None = None) -> Scores:
        values = model.gathered(values)
        keys = jax.vmap(lambda number: jax.random.fold_in(key, number))(batch.number)

        def bind(key: jax.Array) -> GenerativeModel:
            return cast(GenerativeModel, bound(values, key))

        def of_row(row: TrainingBatch, key: jax.Array) -> tuple[jax.Array, RouterSums | None]:
            calls = LayerCalls(recompute, observes_routers, _ROWS if is_mapped else None)
            hidden = hidden_states(bind(key), row, calls, scratch)
            return hidden, jax.tree.map(lambda *each: sum(each), *calls.router_sums) if observes_routers else None

        if is_mapped:
            hidden, router_sums = jax.vmap(of_row, axis_name=_ROWS)(batch, keys)
        else:
            hidden, router_sums = jax.lax.map(lambda each: of_row(*each), (batch, keys))
        compute_logits = bind(key).compute_logits

        def head(hidden: jax.Array) -> jax.Array:
            logits = compute_logits(hidden).astype(jnp.float32)
            return logits if draws is None else draws.logits(logits)

        shape = batch.ids.shape
        rows = hidden.reshape(-1, hidden.shape[-1])

        def vocab_logprobs(positions: jax.Array) -> jax.Array:
            logits = head(rows[positions])
            return logits - logsumexp(logits)[:, None]

        logprobs, hits = token_logprobs(
            head,
            rows,
            jnp.asarray(batch.targets).reshape(-1),
            jnp.asarray(batch.learned).reshape(-1),
            head_is_frozen=head_is_frozen,
        )
        router_sums = jax.tree.map(lambda each: jnp.sum(each, axis=0), router_sums)
        return Scores(logprobs.reshape(shape), hits.reshape(shape), router_sums, vocab_logprobs)

    return forward


class Objective(Protocol):
    """What is minimized: the sum of `loss` over micro-batches, divided by the `weight` of all of them together."""

    def weight(self, batch: TrainingBatch) -> jax.Array:
        """What the sum of losses of a batch, of any number of micro-batches, is divided by."""
        ...

    def loss(self, forward: Forward, values: Values, frozen: Values, batch: TrainingBatch, key: jax.Array) -> Losses:
        """The losses of a micro-batch.

        Args:
          forward: The model.
          values: Its weights.
          frozen: What of those is not trained, and what the others were before training, where that is needed.
          batch: The micro-batch.
          key: What is random in it.
        """
        ...


@dataclass(frozen=True)
class CrossEntropy:
    """The negative log-probability of learned tokens, in nats; its weight is their number."""

    def weight(self, batch: TrainingBatch) -> jax.Array:
        """See `Objective`."""
        return jnp.sum(batch.learned, dtype=jnp.float32)

    def loss(self, forward: Forward, values: Values, frozen: Values, batch: TrainingBatch, key: jax.Array) -> Losses:
        """See `Objective`."""
        del frozen
        scores = forward(values, batch, key)
        sums = {"accuracy": jnp.sum(scores.hits, dtype=jnp.float32)}
        return Losses(-jnp.sum(scores.logprobs), sums, scores.router_sums)


@dataclass(frozen=True)
class DPO:
    """Direct preference optimization (arXiv:2305.18290); its weight is the number of pairs.

    Answers are compared with those of the model before training.

    Attributes:
      beta: How far from that the model may go: less with a larger one.
      label_smoothing: The share of pairs that are taken to be the wrong way round (conservative DPO).
      loss_type: sigmoid, hinge (SLiC, arXiv:2305.10425) or ipo (arXiv:2310.12036), of the mean over an answer's tokens.
    """

    beta: float = 0.1
    label_smoothing: float = 0.0
    loss_type: str = "sigmoid"

    def weight(self, batch: TrainingBatch) -> jax.Array:
        """See `Objective`."""
        return jnp.sum(batch.num_sequences, dtype=jnp.float32) / 2

    def loss(self, forward: Forward, values: Values, frozen: Values, batch: TrainingBatch, key: jax.Array) -> Losses:
        """See `Objective`."""
        reference = jax.lax.stop_gradient(forward(frozen, batch, key).logprobs)
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
    """DPO's own losses of pairs [N], whose rewards differ by the margin; see `DPO`."""
    return -(1 - label_smoothing) * jax.nn.log_sigmoid(margin) - label_smoothing * jax.nn.log_sigmoid(-margin)


def _sums_of_pairs(
    losses: jax.Array, chosen: jax.Array, rejected: jax.Array, is_pair: jax.Array
) -> tuple[jax.Array, Sums]:
    """The sum of losses over pairs, and of what is reported of them.

    Args:
      losses: float32 [N].
      chosen: float32 [N], the rewards of chosen answers: beta times the logarithm of how much more likely they are
        than under the reference.
      rejected: float32 [N], those of rejected answers.
      is_pair: bool [N]; the others are padding.
    """
    margin = chosen - rejected

    def total(each: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(is_pair, each, 0.0), dtype=jnp.float32)

    return total(losses), {
        "rewards/chosen": total(chosen),
        "rewards/rejected": total(rejected),
        "rewards/margins": total(margin),
        "rewards/accuracies": total(margin > 0),
    }
