"""A recurrence over the tokens of a flat batch, token by token: the definition of all layers with a recurrent state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxis.kernels.state_slots import RecurrentStates, TokenSlots, load_slots, store_slots


def scan_tokens(
    step: Callable[[jax.Array, Any], tuple[jax.Array, jax.Array]],
    states: RecurrentStates,
    shape: tuple[int, ...],
    inputs: Any,
) -> tuple[jax.Array | None, jax.Array]:
    """Runs `step` over the tokens, from each request's state; returns the updated state, and outputs [T, ...].

    `step` maps a state of this shape and one token's inputs to the state after the token and its output. `inputs` are
    a pytree of arrays [T, ...]. Outputs are zeros for padding.
    """
    tokens = TokenSlots.of(states, jax.tree.leaves(inputs)[0].shape[0])

    def body(carry: tuple[jax.Array, jax.Array | None], token: tuple[TokenSlots, Any]) -> tuple[Any, jax.Array]:
        running, state = carry
        slots, inputs = token
        first = jnp.zeros(shape, jnp.float32) if state is None else load_slots(state, slots.read).astype(jnp.float32)
        running, out = step(jnp.where(slots.is_first, first, running), inputs)
        if state is not None:
            state = store_slots(store_slots(state, slots.write, running), slots.keep, running)
        return (running, state), jnp.where(slots.valid, out, 0)

    (_, state), out = jax.lax.scan(body, (jnp.zeros(shape, jnp.float32), states.array), (tokens, inputs))
    return state, out
