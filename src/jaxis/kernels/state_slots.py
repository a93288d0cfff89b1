"""A recurrence over the tokens of a flat batch, token by token: the definition of the layers with a recurrent state."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

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


# A recurrence over the tokens of a flat batch, token by token: the definition of the layers with a recurrent state.


def scan_tokens(
    step: Callable[[jax.Array, Any], tuple[jax.Array, jax.Array]],
    state: jax.Array | None,
    shape: tuple[int, ...],
    tokens: TokenSlots,
    inputs: Any,
) -> tuple[jax.Array | None, jax.Array]:
    """Runs `step` over the tokens, from each request's state.

    Args:
      step: From a state and one token's inputs to the state after the token and its output.
      state: [num_slots, *shape]; None: requests begin with zeros, and their states are dropped.
      shape: Of one state.
      tokens: What the T tokens read and write.
      inputs: A pytree of arrays [T, ...].

    Returns:
      The updated state (None without one), and the outputs [T, ...], zeros for padding.
    """

    def body(carry: tuple[jax.Array, jax.Array | None], token: tuple[TokenSlots, Any]) -> tuple[Any, jax.Array]:
        running, state = carry
        slots, inputs = token
        first = jnp.zeros(shape, jnp.float32) if state is None else load_slots(state, slots.read).astype(jnp.float32)
        running, out = step(jnp.where(slots.is_first, first, running), inputs)
        if state is not None:
            state = store_slots(store_slots(state, slots.write, running), slots.keep, running)
        return (running, state), jnp.where(slots.valid, out, 0)

    (_, state), out = jax.lax.scan(body, (jnp.zeros(shape, jnp.float32), state), (tokens, inputs))
    return state, out
