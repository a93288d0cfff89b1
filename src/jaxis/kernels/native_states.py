"""Calls of native kernels for recurrent layers, with a state that is updated in place or over whole sequences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxis.kernels import native
from jaxis.kernels.state_slots import Operands, RecurrentStates, StateSlots

Results = tuple[jax.Array | None, jax.Array]


def supports(states: RecurrentStates) -> bool:
    return native.usable() and (states.array is None or states.array.dtype == jnp.float32)


def call(
    name: str, inputs: tuple[jax.Array, ...], states: RecurrentStates, out_shape: tuple[int, ...], **attributes: Any
) -> tuple[jax.Array, jax.Array]:
    """Calls a kernel with the state slots that requests read and write; returns the states and the output.

    The states are updated in place if they are donated; the output is float32 of `out_shape`.
    """
    array, slots = states.array, states.slots
    assert array is not None
    assert slots is not None
    outputs = (jax.ShapeDtypeStruct(array.shape, array.dtype), jax.ShapeDtypeStruct(out_shape, jnp.float32))
    requests = (slots.read, slots.write, slots.keep, slots.keep_after, states.query_start_loc, states.num_requests)
    array, out = native.call(name, outputs, *inputs, array, *requests, aliases={len(inputs): 0}, **attributes)
    return array, out


def in_place_or_whole(
    kernel: Callable[[Operands], Results],
    definition: Callable[[Operands], Results],
    operands: Operands,
    empty_state: jax.ShapeDtypeStruct,
) -> Results:
    """Calls a kernel; over whole sequences, it is differentiated and vectorised as the definition in plain JAX.

    `empty_state` is the array of 0 states that the kernel takes then.
    """
    if operands.states.array is not None:
        return kernel(operands)

    def run(operands: Operands) -> jax.Array:
        states = operands.states
        none = jnp.full(states.query_start_loc.shape[0] - 1, -1, jnp.int32)
        slots = StateSlots(read=none, write=none, keep=none, keep_after=none)
        empty = jnp.zeros(empty_state.shape, empty_state.dtype)  # made here: derivatives must hold no tracer
        return kernel(operands._replace(states=states._replace(array=empty, slots=slots)))[1]

    return None, native.transformable(run, lambda operands: definition(operands)[1])(operands)
