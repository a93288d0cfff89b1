"""Definition of Mamba's selective scan in plain JAX: token by token, in float32."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxis.kernels.state_slots import RecurrentStates
from jaxis.kernels.token_scan import scan_tokens


class ScanOperands(NamedTuple):
    """Operands of `selective_scan`, for a flat batch of T tokens.

    Attributes:
      x: [T, I].
      dt: float32 [T, I], the time step, after its softplus.
      a: float32 [I, N], negative.
      b, c: [T, N], shared by all channels.
      d: [I].
      states: States, float32 [N, I] each.
    """

    x: jax.Array
    dt: jax.Array
    a: jax.Array
    b: jax.Array
    c: jax.Array
    d: jax.Array
    states: RecurrentStates


class ScanInputs(NamedTuple):
    """Inputs of one token, or of many with a leading axis, in float32."""

    x: jax.Array  # [I]
    dt: jax.Array  # [I]
    b: jax.Array  # [N]
    c: jax.Array  # [N]

    @classmethod
    def of(cls, operands: ScanOperands) -> ScanInputs:
        x, dt, _, b, c, *_ = operands
        return cls(*(operand.astype(jnp.float32) for operand in (x, dt, b, c)))


def selective_scan(operands: ScanOperands) -> tuple[jax.Array | None, jax.Array]:
    step = functools.partial(token_step, operands.a.T, operands.d.astype(jnp.float32))
    state, y = scan_tokens(step, operands.states, operands.a.T.shape, ScanInputs.of(operands))
    return state, y.astype(operands.x.dtype)


def token_step(rates: jax.Array, skip: jax.Array, state: jax.Array, token: ScanInputs) -> tuple[jax.Array, jax.Array]:
    """Returns the state [N, I] after a token, and its output [I], for decay rates [N, I] and skip weights [I]."""
    state = state * jnp.exp(token.dt * rates) + (token.dt * token.x) * token.b[:, None]
    return state, jnp.sum(state * token.c[:, None], axis=0) + skip * token.x
