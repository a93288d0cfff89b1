"""Which slots of a state cache the requests of a step read and write, for layers with a recurrent state.

A state cache is an array [num_slots, ...]. A request's state is whole in one slot, and reading and writing are
separate: a slot that must not change any more is read by one request or by many, while each of them writes to a slot of
its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxis.kernels.ragged_paged_attention.layout import request_of_token


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StateSlots:
    """The slots of a step's R requests; a request without tokens in this step writes nothing.

    What one request writes or keeps to, no other reads, writes or keeps to in the same step.

    Attributes:
      read: i32 [R], the slot with the state before the request's first token of this step; -1: the state is zeros.
      write: i32 [R], the slot that gets the state after its last token of this step. It may be the one that is read;
        -1: none.
      keep: i32 [R], a second slot, which gets the state after `keep_after` tokens; -1: none.
      keep_after: i32 [R], a number of the request's tokens in this step, from 1 to all. Meaningless where `keep` is -1.
    """

    read: jax.Array
    write: jax.Array
    keep: jax.Array
    keep_after: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TokenSlots:
    """The same for each of a flat batch's T tokens.

    Attributes:
      valid: bool [T], whether it is not padding.
      is_first: bool [T], whether it is the first of its request in this step.
      read: i32 [T], the slot to begin with at the first token; -1: zeros.
      write: i32 [T], the slot that gets the state after this token; -1: none.
      keep: i32 [T], the second slot that gets it; -1: none.
    """

    valid: jax.Array
    is_first: jax.Array
    read: jax.Array
    write: jax.Array
    keep: jax.Array

    @classmethod
    def of(
        cls, slots: StateSlots | None, query_start_loc: jax.Array, num_requests: jax.Array, num_tokens: int
    ) -> TokenSlots:
        """What the tokens of a step read and write; without slots, only where the requests begin."""
        request, valid = request_of_token(query_start_loc, num_requests, num_tokens)
        count = jnp.arange(num_tokens, dtype=jnp.int32) - query_start_loc[request] + 1
        is_first = valid & (count == 1)
        if slots is None:
            none = jnp.full(num_tokens, -1, jnp.int32)
            return cls(valid, is_first, none, none, none)
        is_last = valid & (count == query_start_loc[request + 1] - query_start_loc[request])
        is_kept = valid & (count == slots.keep_after[request])
        return cls(
            valid,
            is_first,
            slots.read[request],
            jnp.where(is_last, slots.write[request], -1),
            jnp.where(is_kept, slots.keep[request], -1),
        )


def load_slots(state: jax.Array, slot: jax.Array) -> jax.Array:
    """The states [..., *rest] in the slots i32 [...] of the state cache [num_slots, *rest]; zeros for slot -1."""
    has_slot = (slot >= 0).reshape(slot.shape + (1,) * (state.ndim - 1))
    return jnp.where(has_slot, state[jnp.maximum(slot, 0)], 0)


def store_slots(state: jax.Array, slot: jax.Array, values: jax.Array) -> jax.Array:
    """The state cache [num_slots, *rest] with `values` [..., *rest] in the slots i32 [...]; nothing for slot -1."""
    return state.at[jnp.where(slot >= 0, slot, state.shape[0])].set(values.astype(state.dtype), mode="drop")
