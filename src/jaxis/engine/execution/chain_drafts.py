"""The program that drafts with a chain of layers, each for one draft (`DraftsByChain`).

Every layer runs once over all rows of a step, also over those of drafts that layers before have made: in the last rows
of a sequence, layer l reads tokens that are drafted. What it writes there is computed again when the tokens are known.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxis.engine.execution.draft_program import DraftKey, one_token_each
from jaxis.kernels.sampling import argmax


def states_before(rows: jax.Array, num_layers: int, states: Sequence[jax.Array]) -> list[jax.Array]:
    """The states of the rows before each of these, which layers are to see again (`UndraftedStep.states_before`).

    Args:
      rows: i32 [S].
      num_layers: L of the chain.
      states: Each [T, E].

    Returns:
      Of each, [(L - 1) * S, E]: first those one row before, then those two rows before.
    """
    back = jnp.arange(1, num_layers, dtype=jnp.int32)[:, None]
    before = jnp.maximum(rows[None] - back, 0).reshape(-1)
    return [each[before] for each in states]


def draft_by_chain(
    key: DraftKey,
    model: Any,
    caches: list[Any],
    hidden_states: jax.Array,
    aux_hidden_states: Sequence[jax.Array],
    packed_step: jax.Array,
    packed: jax.Array,
) -> tuple[list[Any], jax.Array]:
    """Inside a jitted function: what a `DraftKey` says.

    Drafts beyond the number of layers are made by the last one, each from what it returned for the one before.

    Args:
      key: The program.
      model: The target, whose `draft` has the layers.
      caches: Theirs.
      hidden_states: [T, E], after the target's final norm.
      aux_hidden_states: Those of `DecoderModel.aux_hidden_state_layers`.
      packed_step: By `pack_step`.
      packed: By `pack_drafting`.
    """
    chain = model.draft
    step, fields = key.unpack(packed_step, packed)
    token_ids = fields["token_ids"].reshape(key.num_layers, -1)
    rows, is_sequence = fields["rows"], jnp.arange(key.num_rows) < fields["num_sequences"][0]
    # Of the rows of each sequence that drafts, the first.
    starts = step.query_start_loc[None]
    first_rows = jnp.where(starts <= rows[:, None], starts, 0).max(axis=1)
    length = jnp.minimum(fields["length"][0], key.num_drafts)
    vocab_size = model.decoder.embed_tokens.output_size

    def following(index: int, states: jax.Array) -> jax.Array:
        """The tokens that a layer holds for the most likely ones after the rows of these states."""
        indices, _ = argmax(chain.layer_logits(index, model, states).astype(jnp.float32))
        # Of logits that are not finite, the index is meaningless.
        return jnp.clip(indices, 0, vocab_size - 1)

    def nothing(states: jax.Array) -> jax.Array:
        return jnp.zeros(len(states), jnp.int32)

    first_states = states = chain.first_states(hidden_states, aux_hidden_states)
    drafts = jnp.zeros((key.num_drafts, key.num_rows), jnp.int32)
    for index in range(chain.num_layers):
        next_ids = token_ids[index]
        for back in range(max(0, index - key.num_drafts), index):
            place = jnp.where(is_sequence & (rows - back >= first_rows), rows - back, len(next_ids))
            next_ids = next_ids.at[place].set(drafts[index - 1 - back], mode="drop")
        if index:
            states = chain.layer_input(first_states, states)
        caches, states = chain.run_layer(index, model, caches, next_ids, states, step)
        if key.num_rows and index < key.num_drafts:
            drafted = jax.lax.cond(index < length, functools.partial(following, index), nothing, states[rows])
            drafts = drafts.at[index].set(drafted)
    if key.num_rows == 0 or key.num_drafts <= chain.num_layers:
        return caches, drafts.T
    last = chain.num_layers - 1

    def one_more(number: jax.Array, carry: tuple[list[Any], jax.Array, jax.Array]) -> tuple[Any, jax.Array, jax.Array]:
        caches, states, drafts = carry
        metadata = one_token_each(key, fields, fields["positions"] + number - chain.num_layers)
        caches, states = chain.run_layer(last, model, caches, drafts[number - 1], states, metadata)
        return caches, states, drafts.at[number].set(following(last, states))

    caches, _, drafts = jax.lax.fori_loop(chain.num_layers, length, one_more, (caches, states[rows], drafts))
    return caches, drafts.T
