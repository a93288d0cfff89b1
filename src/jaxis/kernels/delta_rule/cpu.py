"""The gated delta rule on CPU: a native kernel that computes token by token, so that bits do not depend on steps."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxis.kernels import native, native_states
from jaxis.kernels.delta_rule import reference
from jaxis.kernels.state_slots import StateSlots


def supports(state: jax.Array | None) -> bool:
    return native.usable() and (state is None or state.dtype == jnp.float32)


def gated_delta_rule(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    log_decay: jax.Array,
    beta: jax.Array,
    state: jax.Array | None,
    slots: StateSlots | None,
    query_start_loc: jax.Array,
    num_requests: jax.Array,
    *,
    l2_norm_epsilon: float | None,
    scale: float,
) -> tuple[jax.Array | None, jax.Array]:
    options = {"l2_norm_epsilon": l2_norm_epsilon, "scale": scale}
    kernel = functools.partial(_kernel, **options)
    operands = (q, k, v, log_decay, beta)
    if state is None or slots is None:
        definition = functools.partial(reference.gated_delta_rule, **options)
        empty = jnp.zeros((0, v.shape[1], k.shape[2], v.shape[2]), jnp.float32)
        return None, native_states.over_whole_sequences(
            kernel, definition, operands, empty, query_start_loc, num_requests
        )
    return kernel(*operands, state, slots, query_start_loc, num_requests)


def _kernel(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    log_decay: jax.Array,
    beta: jax.Array,
    state: jax.Array,
    slots: StateSlots,
    query_start_loc: jax.Array,
    num_requests: jax.Array,
    *,
    l2_norm_epsilon: float | None,
    scale: float,
) -> tuple[jax.Array, jax.Array]:
    inputs = tuple(x.astype(jnp.float32) for x in (q, k, v, log_decay.reshape(*v.shape[:2], -1), beta))
    state, out = native_states.call(
        "gated_delta_rule",
        inputs,
        state,
        slots,
        query_start_loc,
        num_requests,
        v.shape,
        has_norm=l2_norm_epsilon is not None,
        epsilon=np.float32(l2_norm_epsilon or 0),
        scale=np.float32(scale),
    )
    return state, out.astype(v.dtype)
