"""Definition of Mamba's selective scan in plain JAX: token by token, in float32."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxis.kernels.state_slots import StateSlots, TokenSlots
from jaxis.kernels.token_scan import scan_tokens


class ScanInputs(NamedTuple):
    """Inputs of one token, or of many with a leading axis, in float32."""

    x: jax.Array  # [I]
    dt: jax.Array  # [I]
    b: jax.Array  # [N]
    c: jax.Array  # [N]

    @classmethod
    def of(cls, x: jax.Array, dt: jax.Array, b: jax.Array, c: jax.Array) -> ScanInputs:
        return cls(*(operand.astype(jnp.float32) for operand in (x, dt, b, c)))


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
    tokens = TokenSlots.of(slots, query_start_loc, num_requests, x.shape[0])
    step = functools.partial(token_step, a.T, d.astype(jnp.float32))
    state, y = scan_tokens(step, state, a.T.shape, tokens, ScanInputs.of(x, dt, b, c))
    return state, y.astype(x.dtype)


def token_step(rates: jax.Array, skip: jax.Array, state: jax.Array, token: ScanInputs) -> tuple[jax.Array, jax.Array]:
    """Returns the state [N, I] after a token, and its output [I], for decay rates [N, I] and skip weights [I]."""
    state = state * jnp.exp(token.dt * rates) + (token.dt * token.x) * token.b[:, None]
    return state, jnp.sum(state * token.c[:, None], axis=0) + skip * token.x
