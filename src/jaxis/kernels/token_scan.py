"""A recurrence over the tokens of a flat batch, token by token: the definition of all layers with a recurrent state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxis.kernels.state_slots import TokenSlots, load_slots, store_slots


def scan_tokens(
    step: Callable[[jax.Array, Any], tuple[jax.Array, jax.Array]],
    state: jax.Array | None,
    shape: tuple[int, ...],
    tokens: TokenSlots,
    inputs: Any,
) -> tuple[jax.Array | None, jax.Array]:
    """Runs `step` over the tokens, from each request's state; returns the updated state, and outputs [T, ...].

    `step` maps a state and one token's inputs to the state after the token and its output. The state is [num_slots,
    *shape]; None: requests begin with zeros, and None is returned. `inputs` are a pytree of arrays [T, ...]. Outputs
    are zeros for padding.
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
