"""Rows of earlier tokens of the same request, from a flat batch or from the state that holds the last W of each."""

from __future__ import annotations

from collections.abc import Iterable

import jax
import jax.numpy as jnp

from jaxis.kernels.batch import request_of_token
from jaxis.kernels.state_slots import StateSlots, store_slots


def earlier_rows(
    x: jax.Array,
    state: jax.Array | None,
    slots: StateSlots | None,
    query_start_loc: jax.Array,
    num_requests: jax.Array,
    distances: Iterable[int],
) -> list[jax.Array]:
    """Returns, for each distance from 0 to W, the rows [T, C] of the tokens that far before x's own.

    They are zeros before a request begins. `state` is [num_slots, W, C], oldest first; None: there is none before the
    batch.
    """
    request, _ = request_of_token(query_start_loc, num_requests, x.shape[0])
    read = None if slots is None else slots.read[request]
    row = jnp.arange(x.shape[0], dtype=jnp.int32)
    start = query_start_loc[request]
    return [_rows_at(x, state, read, row - distance, start) for distance in distances]


def kept_rows(
    x: jax.Array, state: jax.Array, slots: StateSlots, query_start_loc: jax.Array, num_requests: jax.Array
) -> jax.Array:
    """Returns the state [num_slots, W, C] with the last W rows of each request in the slots that it writes."""
    start, end = query_start_loc[:-1], query_start_loc[1:]
    has_tokens = (jnp.arange(start.shape[0]) < num_requests) & (end > start)
    places = jnp.arange(-state.shape[1], 0, dtype=jnp.int32)

    def last_rows(end: jax.Array) -> jax.Array:
        row = end[:, None] + places
        read = jnp.broadcast_to(slots.read[:, None], row.shape)
        return _rows_at(x, state, read, row, start[:, None])

    written = last_rows(end)
    is_kept = has_tokens & (slots.keep_after >= 1) & (slots.keep_after <= end - start)
    kept = last_rows(start + slots.keep_after)
    updated = store_slots(state, jnp.where(has_tokens, slots.write, -1), written)
    return store_slots(updated, jnp.where(is_kept, slots.keep, -1), kept)


def _rows_at(
    x: jax.Array, state: jax.Array | None, read: jax.Array | None, row: jax.Array, start: jax.Array
) -> jax.Array:
    """Returns x's rows i32 [...], [..., C]; rows before a request's `start` come from the state."""
    inside = x[jnp.clip(row, 0, x.shape[0] - 1)]
    if state is None or read is None:
        before = jnp.zeros_like(inside)
    else:
        width = state.shape[1]
        place = jnp.clip(row - start + width, 0, width - 1)
        before = jnp.where((read >= 0)[..., None], state[jnp.maximum(read, 0), place], 0)
    return jnp.where((row >= start)[..., None], inside, before)
