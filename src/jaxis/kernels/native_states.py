"""Calls of native kernels for recurrent layers, with a state that is updated in place or over whole sequences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxis.kernels import native
from jaxis.kernels.state_slots import StateSlots


def call(
    name: str,
    inputs: tuple[jax.Array, ...],
    state: jax.Array,
    slots: StateSlots,
    query_start_loc: jax.Array,
    num_requests: jax.Array,
    out_shape: tuple[int, ...],
    **attributes: Any,
) -> tuple[jax.Array, jax.Array]:
    """Calls a kernel with the state slots that requests read and write; returns the state and the output.

    The state is updated in place if it is donated; the output is float32 of `out_shape`.
    """
    outputs = (jax.ShapeDtypeStruct(state.shape, state.dtype), jax.ShapeDtypeStruct(out_shape, jnp.float32))
    operands = (slots.read, slots.write, slots.keep, slots.keep_after, query_start_loc, num_requests)
    state, out = native.call(name, outputs, *inputs, state, *operands, aliases={len(inputs): 0}, **attributes)
    return state, out


def over_whole_sequences(
    kernel: Callable[..., tuple[jax.Array, jax.Array]],
    definition: Callable[..., tuple[jax.Array | None, jax.Array]],
    inputs: tuple[jax.Array | None, ...],
    empty_state: jax.Array,
    query_start_loc: jax.Array,
    num_requests: jax.Array,
) -> jax.Array:
    """Returns the output over whole sequences; differentiated and vectorised as the definition.

    `kernel` maps the inputs, a state, slots, query_start_loc i32 [R + 1] and num_requests i32 [] to a state and the
    output. `definition` is the same in plain JAX, and takes None as state and slots. `empty_state` has 0 slots.
    """

    def run(*operands: jax.Array) -> jax.Array:
        *inputs, query_start_loc, num_requests = operands
        none = jnp.full(query_start_loc.shape[0] - 1, -1, jnp.int32)
        slots = StateSlots(read=none, write=none, keep=none, keep_after=none)
        empty = jnp.zeros(empty_state.shape, empty_state.dtype)  # made here: derivatives must hold no tracer
        return kernel(*inputs, empty, slots, query_start_loc, num_requests)[1]

    def define(*operands: jax.Array) -> jax.Array:
        *inputs, query_start_loc, num_requests = operands
        return definition(*inputs, None, None, query_start_loc, num_requests)[1]

    return native.transformable(run, define)(*inputs, query_start_loc, num_requests)
