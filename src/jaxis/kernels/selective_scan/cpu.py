"""Mamba's selective scan on CPU: a native kernel that computes token by token, so that bits do not depend on steps."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxis.kernels import native, native_states
from jaxis.kernels.selective_scan import reference
from jaxis.kernels.state_slots import StateSlots


def supports(state: jax.Array | None) -> bool:
    return native.usable() and (state is None or state.dtype == jnp.float32)


def selective_scan(
    x: jax.Array,
    dt: jax.Array,
    a: jax.Array,
    b: jax.Array,
    c: jax.Array,
    d: jax.Array,
    state: jax.Array | None,
    slots: StateSlots | None,
    query_start_loc: jax.Array,
    num_requests: jax.Array,
) -> tuple[jax.Array | None, jax.Array]:
    operands = (x, dt, a, b, c, d)
    if state is None or slots is None:
        empty = jnp.zeros((0, *a.T.shape), jnp.float32)
        return None, native_states.over_whole_sequences(
            _kernel, reference.selective_scan, operands, empty, query_start_loc, num_requests
        )
    return _kernel(*operands, state, slots, query_start_loc, num_requests)


def _kernel(
    x: jax.Array,
    dt: jax.Array,
    a: jax.Array,
    b: jax.Array,
    c: jax.Array,
    d: jax.Array,
    state: jax.Array,
    slots: StateSlots,
    query_start_loc: jax.Array,
    num_requests: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    inputs = tuple(operand.astype(jnp.float32) for operand in (x, dt, a, b, c, d))
    state, y = native_states.call("selective_scan", inputs, state, slots, query_start_loc, num_requests, x.shape)
    return state, y.astype(x.dtype)
