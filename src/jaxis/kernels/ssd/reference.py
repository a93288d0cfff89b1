"""Definition of Mamba2's recurrence in plain JAX: token by token, in float32."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxis.kernels.state_slots import StateSlots, TokenSlots
from jaxis.kernels.token_scan import scan_tokens


class SsdInputs(NamedTuple):
    """Inputs of one token, or of many with a leading axis, in float32."""

    x: jax.Array  # [H, P], times the time step
    log_decay: jax.Array  # [H]
    b: jax.Array  # [G, N]
    c: jax.Array  # [G, N]

    @classmethod
    def of(cls, x: jax.Array, dt: jax.Array, a: jax.Array, b: jax.Array, c: jax.Array) -> SsdInputs:
        x, dt, a, b, c = (operand.astype(jnp.float32) for operand in (x, dt, a, b, c))
        return cls(x * dt[..., None], dt * a, b, c)


def ssd(
    x: jax.Array,
    dt: jax.Array,
    a: jax.Array,
    b: jax.Array,
    c: jax.Array,
    d: jax.Array | None,
    state: jax.Array | None,
    slots: StateSlots | None,
    query_start_loc: jax.Array,
    num_requests: jax.Array,
) -> tuple[jax.Array | None, jax.Array]:
    tokens = TokenSlots.of(slots, query_start_loc, num_requests, x.shape[0])
    inputs = SsdInputs.of(x, dt, a, b, c)
    state, y = scan_tokens(token_step, state, (*x.shape[1:], b.shape[2]), tokens, inputs)
    return state, with_skip(y, x, d, tokens.valid)


def token_step(state: jax.Array, token: SsdInputs) -> tuple[jax.Array, jax.Array]:
    """Returns the state [H, P, N] after a token, and the token's output [H, P]."""
    group_size = token.x.shape[0] // token.b.shape[0]
    b, c = (jnp.repeat(vector, group_size, axis=0) for vector in (token.b, token.c))
    state = state * jnp.exp(token.log_decay)[:, None, None] + token.x[:, :, None] * b[:, None, :]
    return state, jnp.einsum("hpn,hn->hp", state, c, precision=jax.lax.Precision.HIGHEST)


def with_skip(y: jax.Array, x: jax.Array, d: jax.Array | None, valid: jax.Array) -> jax.Array:
    """Returns y [T, H, P] plus `d * x` for tokens that are not padding, in x's type."""
    if d is not None:
        y = y + jnp.where(valid[:, None, None], d.astype(jnp.float32)[:, None] * x.astype(jnp.float32), 0)
    return y.astype(x.dtype)
