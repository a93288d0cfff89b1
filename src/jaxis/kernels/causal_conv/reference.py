"""Definition of the short causal convolution in plain JAX, computed in float32."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxis.kernels.ragged_paged_attention.layout import request_of_token
from jaxis.kernels.state_slots import StateSlots, store_slots


def causal_conv(
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None,
    state: jax.Array | None,
    slots: StateSlots | None,
    query_start_loc: jax.Array,
    num_requests: jax.Array,
    *,
    activation: str | None,
) -> tuple[jax.Array | None, jax.Array]:
    num_tokens, num_channels = x.shape
    width = weight.shape[1]
    request, valid = request_of_token(query_start_loc, num_requests, num_tokens)
    read = None if slots is None else slots.read[request]
    row = jnp.arange(num_tokens, dtype=jnp.int32)
    start = query_start_loc[request]
    y = jnp.zeros((num_tokens, num_channels), jnp.float32) if bias is None else bias.astype(jnp.float32)
    for tap in range(width):
        inputs = _inputs_at(x, state, read, row - (width - 1 - tap), start, width)
        y = y + weight[:, tap].astype(jnp.float32) * inputs.astype(jnp.float32)
    if activation == "silu":
        y = jax.nn.silu(y)
    y = jnp.where(valid[:, None], y, 0).astype(x.dtype)
    if state is None or slots is None:
        return None, y
    return _updated(x, state, slots, query_start_loc, num_requests, width), y


def _inputs_at(
    x: jax.Array, state: jax.Array | None, read: jax.Array | None, row: jax.Array, start: jax.Array, width: int
) -> jax.Array:
    """Returns the inputs [..., C] at rows i32 [...]; rows before a request's `start` come from the state."""
    inside = x[jnp.clip(row, 0, x.shape[0] - 1)]
    if state is None or read is None:
        before = jnp.zeros_like(inside)
    else:
        place = jnp.clip(row - start + width - 1, 0, width - 2)
        before = jnp.where((read >= 0)[..., None], state[jnp.maximum(read, 0), place], 0)
    return jnp.where((row >= start)[..., None], inside, before)


def _updated(
    x: jax.Array,
    state: jax.Array,
    slots: StateSlots,
    query_start_loc: jax.Array,
    num_requests: jax.Array,
    width: int,
) -> jax.Array:
    start, end = query_start_loc[:-1], query_start_loc[1:]
    has_tokens = (jnp.arange(start.shape[0]) < num_requests) & (end > start)
    places = jnp.arange(1 - width, 0, dtype=jnp.int32)

    def last_inputs(end: jax.Array) -> jax.Array:
        row = end[:, None] + places
        read = jnp.broadcast_to(slots.read[:, None], row.shape)
        return _inputs_at(x, state, read, row, start[:, None], width)

    written = last_inputs(end)
    is_kept = has_tokens & (slots.keep_after >= 1) & (slots.keep_after <= end - start)
    kept = last_inputs(start + slots.keep_after)
    updated = store_slots(state, jnp.where(has_tokens, slots.write, -1), written)
    return store_slots(updated, jnp.where(is_kept, slots.keep, -1), kept)
