from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, Self, TypeVar

import jax
import jax.numpy as jnp

from jaxis.kernels.batch import request_of_token


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

    def is_kept(self, num_tokens: jax.Array) -> jax.Array:
        """Returns bool [R]: whether a state is kept after some of the request's tokens, whose number is i32 [R]."""
        return (self.keep >= 0) & (self.keep_after >= 1) & (self.keep_after <= num_tokens)


class RecurrentStates(NamedTuple):
    """States of the requests whose tokens stand one behind the other in a flat batch.

    Attributes:
      array: [num_slots, *shape of a state], updated in place if donated. None: the requests are whole sequences, whose
        states begin as zeros and are dropped, and a recurrence over them is differentiable.
      slots: Slots that the requests read and write; None without an array.
      query_start_loc: i32 [R + 1]; the tokens of request r are rows [r] to [r + 1], later rows are padding.
      num_requests: i32 [], the number of requests that are not padding.
    """

    array: jax.Array | None
    slots: StateSlots | None
    query_start_loc: jax.Array
    num_requests: jax.Array

    def check(self) -> None:
        """Raises ValueError if there is an array without slots, or slots without an array."""
        if (self.array is None) != (self.slots is None):
            raise ValueError("a state and its slots are given together")

    @property
    def num_tokens(self) -> jax.Array:
        """Returns the number of each request's tokens, i32 [R]; 0 for padding."""
        is_request = jnp.arange(self.query_start_loc.shape[0] - 1) < self.num_requests
        return jnp.where(is_request, self.query_start_loc[1:] - self.query_start_loc[:-1], 0)

    def valid(self, num_tokens: int) -> jax.Array:
        """Returns bool [T], False for rows of padding."""
        return request_of_token(self.query_start_loc, self.num_requests, num_tokens)[1]


class StateOperands(Protocol):
    """Operands of a recurrent kernel: a named tuple, whose last field has the requests' states."""

    @property
    def states(self) -> RecurrentStates: ...

    @classmethod
    def _make(cls, iterable: Iterable[Any]) -> Self: ...

    def _replace(self, *, states: RecurrentStates) -> Self: ...


Operands = TypeVar("Operands", bound=StateOperands)


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
    def of(cls, states: RecurrentStates, num_tokens: int) -> TokenSlots:
        """Returns the slots of a step's tokens; without slots of requests, only `valid` and `is_first` have meaning."""
        slots, query_start_loc = states.slots, states.query_start_loc
        request, valid = request_of_token(query_start_loc, states.num_requests, num_tokens)
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
