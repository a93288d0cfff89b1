from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxis.kernels.ragged_paged_attention.layout import request_of_token


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StateSlots:
    """State slots of a step's R requests; a request without tokens in this step writes nothing.

    A slot that one request writes or keeps to is not read, written or kept to by any other in the same step.

    Attributes:
      read: i32 [R], slot with the state before the request's first token of this step; -1: the state is zeros.
      write: i32 [R], slot for the state after the request's last token of this step, possibly the one that is read; -1:
        none.
      keep: i32 [R], second slot, for the state after `keep_after` tokens; -1: none.
      keep_after: i32 [R], number of the request's tokens in this step, from 1 to all. Meaningless where `keep` is -1.
    """

    read: jax.Array
    write: jax.Array
    keep: jax.Array
    keep_after: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TokenSlots:
    """State slots that each of a flat batch's T tokens reads and writes.

    Attributes:
      valid: bool [T], False for padding.
      is_first: bool [T], True for a request's first token in this step.
      read: i32 [T], slot to begin with at the first token; -1: zeros.
      write, keep: i32 [T], first and second slot for the state after this token; -1: none.
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
        """Returns the slots of a step's tokens; without slots of requests, only `valid` and `is_first` have meaning."""
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
    """Returns states [..., *rest] from slots i32 [...] of the state cache [num_slots, *rest]; zeros for slot -1."""
    has_slot = (slot >= 0).reshape(slot.shape + (1,) * (state.ndim - 1))
    return jnp.where(has_slot, state[jnp.maximum(slot, 0)], 0)


def store_slots(state: jax.Array, slot: jax.Array, values: jax.Array) -> jax.Array:
    """Returns the state cache [num_slots, *rest] with `values` [..., *rest] in slots i32 [...]; nothing for slot -1."""
    return state.at[jnp.where(slot >= 0, slot, state.shape[0])].set(values.astype(state.dtype), mode="drop")
