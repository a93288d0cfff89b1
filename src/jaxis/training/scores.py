"""The forward pass of objectives: a model's scores of a micro-batch.

The log-probabilities of learned tokens are computed in chunks of tokens, and only for chunks that have learned tokens,
so that the logits of all tokens are never in memory together.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp

from jaxis.engine.execution.model_arrays import GenerativeModel
from jaxis.kernels.sampling import TokenFilters, logsumexp, tempered, weights_of
from jaxis.kernels.weights import ROWS_AXIS
from jaxis.layers.attention_metadata import ScratchCache
from jaxis.layers.module import JaxModule
from jaxis.training.batches import TrainingBatch
from jaxis.training.functional_model import FunctionalModel, LayerCalls, RouterSums, Values, hidden_states

CHUNK_TOKENS = 256


class Scores(NamedTuple):
    """A model's scores of a micro-batch.

    Attributes:
      logprobs: float32 [B, L], log-probability of each learned target; 0 where the target is not learned.
      hits: bool [B, L], True where the target is the most likely token.
      router_sums: Statistics of routers; None if they are not observed.
      vocab_logprobs: Function of positions (int32 [N], counted through all batch rows) that returns the
        log-probabilities of all tokens there, float32 [N, V].
    """

    logprobs: jax.Array
    hits: jax.Array
    router_sums: RouterSums | None
    vocab_logprobs: Callable[[jax.Array], jax.Array]


class Draws(NamedTuple):
    """Changes to a model's distribution before the tokens of a micro-batch were drawn.

    Logits were divided by the temperature, a float32 scalar. Filters have scalar values; None keeps every token.
    """

    temperature: jax.Array
    filters: TokenFilters | None

    def logits(self, logits: jax.Array) -> jax.Array:
        """Returns the logits that the sampler drew from: float32 [R, V] -> [R, V], -inf where filtered."""
        temperature = jnp.full(len(logits), self.temperature)
        divided = tempered(logits, temperature)
        if self.filters is None:
            return divided
        filters = TokenFilters(*(jnp.full(len(logits), each) for each in self.filters))
        # The choice of kept tokens is not differentiated.
        fixed = jax.lax.stop_gradient(logits)
        cutoff = weights_of(fixed, temperature, filters).cutoff
        assert cutoff is not None
        return jnp.where(fixed >= cutoff[:, None], divided, -jnp.inf)


@dataclass(frozen=True)
class States:
    """Hidden states of a micro-batch, whose logits are computed in chunks.

    Attributes:
      hidden: [B * L, E], of all batch rows one after the other.
      head: Function of hidden states [N, E] that returns their logits, float32 [N, V].
      head_is_frozen: True if only hidden states need derivatives; see `in_chunks`.
      router_sums: Statistics of routers; None if they are not observed.
    """

    hidden: jax.Array
    head: Callable[[jax.Array], jax.Array]
    head_is_frozen: bool
    router_sums: RouterSums | None


@dataclass(frozen=True)
class Forward:
    """Forward pass of a model, for objectives; `states` computes the hidden states of a micro-batch."""

    states: Callable[[Values, TrainingBatch, jax.Array], States]

    def __call__(self, values: Values, batch: TrainingBatch, key: jax.Array, draws: Draws | None = None) -> Scores:
        """Scores a micro-batch by the model's own distribution, or by the changed distribution of `draws`."""
        return self._scores(self.states(values, batch, key), batch, draws)

    def fixed(self, values: Values, batch: TrainingBatch, key: jax.Array, draws: Draws | None = None) -> Scores:
        """Scores a micro-batch as a call does, by weights that are not trained: computes nothing for derivatives."""
        states = self.states(values, batch, key)
        fixed = dataclasses.replace(states, hidden=jax.lax.stop_gradient(states.hidden), head_is_frozen=False)
        return self._scores(fixed, batch, draws)

    def _scores(self, states: States, batch: TrainingBatch, draws: Draws | None) -> Scores:
        def head(hidden: jax.Array) -> jax.Array:
            logits = states.head(hidden)
            return logits if draws is None else draws.logits(logits)

        def vocab_logprobs(positions: jax.Array) -> jax.Array:
            logits = head(states.hidden[positions])
            return logits - logsumexp(logits)[:, None]

        logprobs, hits = token_logprobs(
            head,
            states.hidden,
            jnp.asarray(batch.targets).reshape(-1),
            jnp.asarray(batch.learned).reshape(-1),
            head_is_frozen=states.head_is_frozen,
        )
        shape = batch.ids.shape
        return Scores(logprobs.reshape(shape), hits.reshape(shape), states.router_sums, vocab_logprobs)


ChunkLoss = Callable[..., tuple[jax.Array, ...]]
"""Function of a chunk's logits [C, V] and other arrays [C, ...]. It returns a value of each token, float32 [C], perhaps
other results [C], and last the derivatives of each value by its token's logits, float32 [C, V]."""


def in_chunks(
    loss: ChunkLoss,
    head: Callable[[jax.Array], jax.Array],
    hidden: jax.Array,
    learned: jax.Array,
    *others: jax.Array,
    head_is_frozen: bool,
    chunk_tokens: int = CHUNK_TOKENS,
) -> tuple[jax.Array, ...]:
    """Computes the values and other results of a loss for the learned tokens, bool [N]; tokens not learned have zeros.

    `head` maps hidden states [N, E] to float32 [N, V]; the loss is given `others` [N, ...]. If the head is frozen, only
    hidden states need derivatives. These are then computed along with the values, by the loss; otherwise later, by
    computing logits again and differentiating the values.
    """
    size = len(learned)
    chunk_size = min(chunk_tokens, size)
    num_chunks = -(-size // chunk_size)
    # Learned tokens come first, so that as few chunks as possible contain any.
    order = jnp.argsort(~learned, stable=True)
    padded = jnp.concatenate([order, jnp.zeros(num_chunks * chunk_size - size, order.dtype)])
    is_real = jnp.arange(len(padded)) < size

    def value(rows: jax.Array, counts: jax.Array, *others: jax.Array) -> tuple[jax.Array, ...]:
        *results, _ = loss(head(rows), *others)
        return tuple(jnp.where(counts, each, jnp.zeros_like(each)) for each in results)

    def value_and_slope(rows: jax.Array, counts: jax.Array, *others: jax.Array) -> tuple[jax.Array, ...]:
        logits, derive = jax.vjp(head, rows)
        *results, slopes = loss(logits, *others)
        results = [jnp.where(counts, each, jnp.zeros_like(each)) for each in results]
        return *results, derive(jnp.where(counts[:, None], slopes, 0.0))[0]

    def of_chunk(arguments: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        function = value_and_slope if head_is_frozen else value

        def skip(*arguments: jax.Array) -> tuple[jax.Array, ...]:
            return jax.tree.map(lambda each: jnp.zeros(each.shape, each.dtype), jax.eval_shape(function, *arguments))

        return jax.lax.cond(jnp.any(arguments[1]), function, skip, *arguments)

    def chunked(array: jax.Array) -> jax.Array:
        return array.reshape(num_chunks, chunk_size, *array.shape[1:])

    counted = chunked(learned[padded] & is_real)
    rows, *others_of_chunks = (chunked(each[padded]) for each in (hidden, *others))
    if head_is_frozen:
        fixed = jax.lax.stop_gradient(rows)
        values, *more, slopes = jax.lax.map(of_chunk, (fixed, counted, *others_of_chunks))
        # Adds zeros with the derivatives of the values: each depends on its own token's hidden state only.
        values += jnp.sum(slopes.astype(jnp.float32) * (rows - fixed).astype(jnp.float32), axis=-1)
    else:
        values, *more = jax.lax.map(jax.checkpoint(of_chunk), (rows, counted, *others_of_chunks))
    # Back to the order of the tokens.
    places = jnp.where(is_real, padded, size)
    return tuple(jnp.zeros(size, each.dtype).at[places].set(each.reshape(-1), mode="drop") for each in (values, *more))


def token_logprobs(
    head: Callable[[jax.Array], jax.Array],
    hidden: jax.Array,
    targets: jax.Array,
    learned: jax.Array,
    *,
    head_is_frozen: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Computes the log-probabilities of targets int32 [N], for hidden states [N, E]; arguments as of `in_chunks`.

    Returns float32 [N], log-probability of each target that is learned, else 0; and bool [N], True where the target has
    the largest logit.
    """

    def loss(logits: jax.Array, wanted: jax.Array) -> tuple[jax.Array, ...]:
        chosen = jnp.take_along_axis(logits, wanted[:, None], axis=-1)[:, 0]
        # As the sampler computes them.
        normalizers = logsumexp(logits)
        # In one pass, which can overwrite the logits.
        slopes = (jnp.arange(logits.shape[-1]) == wanted[:, None]) - jnp.exp(logits - normalizers[:, None])
        return chosen - normalizers, jnp.argmax(logits, axis=-1) == wanted, slopes

    logprobs, hits = in_chunks(loss, head, hidden, learned, targets, head_is_frozen=head_is_frozen)
    return logprobs, hits


def make_forward(
    model: FunctionalModel,
    bound: Callable[[Values, jax.Array], JaxModule],
    *,
    recompute: bool = False,
    observes_routers: bool = False,
    head_is_frozen: bool = False,
    scratch: ScratchCache | None = None,
) -> Forward:
    """Makes the forward pass of a model.

    Args:
      model: The model.
      bound: Function of weights and the random key of a batch row that returns the model with them.
      recompute: True to recompute layers for their derivatives.
      observes_routers: True to compute `States.router_sums`.
      head_is_frozen: True if only hidden states need derivatives; see `in_chunks`.
      scratch: Cache of the engine's forward pass; None for the plain forward pass.
    """

    is_joined = scratch is not None and not model.has_dense_attention
    is_mapped = scratch is None

    def states(values: Values, batch: TrainingBatch, key: jax.Array) -> States:
        values = model.gathered(values)
        keys = jax.vmap(lambda number: jax.random.fold_in(key, number))(batch.number)

        def bind(key: jax.Array) -> GenerativeModel:
            return cast(GenerativeModel, bound(values, key))

        def of_row(row: TrainingBatch, key: jax.Array) -> tuple[jax.Array, RouterSums | None]:
            calls = LayerCalls(recompute, observes_routers, is_mapped)
            hidden = hidden_states(bind(key), row, calls, scratch)
            return hidden, jax.tree.map(lambda *each: sum(each), *calls.router_sums) if observes_routers else None

        if is_joined:
            # A sequence's bits depend on no other one.
            row, places = batch.joined()
            hidden, router_sums = jax.tree.map(lambda each: each[None], of_row(row, key))
            hidden = hidden[:, places]
        elif is_mapped:
            hidden, router_sums = jax.vmap(of_row, axis_name=ROWS_AXIS)(batch, keys)
        else:
            hidden, router_sums = jax.lax.map(lambda each: of_row(*each), (batch, keys))
        compute_logits = bind(key).compute_logits
        return States(
            hidden.reshape(-1, hidden.shape[-1]),
            lambda hidden: compute_logits(hidden).astype(jnp.float32),
            head_is_frozen,
            jax.tree.map(lambda each: jnp.sum(each, axis=0), router_sums),
        )

    return Forward(states)
