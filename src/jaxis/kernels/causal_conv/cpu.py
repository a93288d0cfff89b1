from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxis.kernels import native, native_states
from jaxis.kernels.causal_conv import reference
from jaxis.kernels.native_constants import ACTIVATIONS
from jaxis.kernels.state_slots import StateSlots

DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)


def supports(x: jax.Array) -> bool:
    return native.usable() and x.dtype in DTYPES


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
    kernel = functools.partial(_kernel, activation=activation)
    operands = (x, weight, bias)
    if state is None or slots is None:
        definition = functools.partial(reference.causal_conv, activation=activation)
        empty = jnp.zeros((0, weight.shape[1] - 1, x.shape[1]), x.dtype)
        return None, native_states.over_whole_sequences(
            kernel, definition, operands, empty, query_start_loc, num_requests
        )
    return kernel(*operands, state, slots, query_start_loc, num_requests)


def _kernel(
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None,
    state: jax.Array,
    slots: StateSlots,
    query_start_loc: jax.Array,
    num_requests: jax.Array,
    *,
    activation: str | None,
) -> tuple[jax.Array, jax.Array]:
    bias = jnp.zeros(0) if bias is None else bias
    inputs = (x, weight.astype(jnp.float32), bias.astype(jnp.float32))
    state, y = native_states.call(
        "causal_conv",
        inputs,
        state,
        slots,
        query_start_loc,
        num_requests,
        x.shape,
        activation=np.int32(ACTIVATIONS[activation or "none"]),
    )
    return state, y.astype(x.dtype)
