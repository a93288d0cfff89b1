"""Definition of Mamba2's recurrence in plain JAX: token by token, in float32."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxis.kernels.state_slots import RecurrentStates
from jaxis.kernels.token_scan import scan_tokens


class SsdOperands(NamedTuple):
    """Operands of `ssd`, for a flat batch of T tokens.

    Attributes:
      x: [T, H, P].
      dt: float32 [T, H], the time step, after its softplus.
      a: float32 [H], negative.
      b, c: [T, G, N]; H / G consecutive heads share a group.
      d: [H]; None for zeros.
      states: States, float32 [H, P, N] each.
    """

    x: jax.Array
    dt: jax.Array
    a: jax.Array
    b: jax.Array
    c: jax.Array
    d: jax.Array | None
    states: RecurrentStates

    @property
    def state_shape(self) -> tuple[int, ...]:
        return (*self.x.shape[1:], self.b.shape[2])


class SsdInputs(NamedTuple):
    """Inputs of one token, or of many with a leading axis, in float32."""

    x: jax.Array  # [H, P], times the time step
    log_decay: jax.Array  # [H]
    b: jax.Array  # [G, N]
    c: jax.Array  # [G, N]

    @classmethod
    def of(cls, operands: SsdOperands) -> SsdInputs:
        x, dt, a, b, c = (operand.astype(jnp.float32) for operand in operands[:5])
        return cls(x * dt[..., None], dt * a, b, c)


def ssd(operands: SsdOperands) -> tuple[jax.Array | None, jax.Array]:
    state, y = scan_tokens(token_step, operands.states, operands.state_shape, SsdInputs.of(operands))
    return state, with_skip(y, operands)


def token_step(state: jax.Array, token: SsdInputs) -> tuple[jax.Array, jax.Array]:
    """Returns the state [H, P, N] after a token, and the token's output [H, P]."""
    group_size = token.x.shape[0] // token.b.shape[0]
    b, c = (jnp.repeat(vector, group_size, axis=0) for vector in (token.b, token.c))
    state = state * jnp.exp(token.log_decay)[:, None, None] + token.x[:, :, None] * b[:, None, :]
    return state, jnp.einsum("hpn,hn->hp", state, c, precision=jax.lax.Precision.HIGHEST)


def with_skip(y: jax.Array, operands: SsdOperands) -> jax.Array:
    """Returns y [T, H, P] plus `d * x` for tokens that are not padding, in x's type."""
    x, d = operands.x, operands.d
    if d is not None:
        valid = operands.states.valid(len(x))[:, None, None]
        y = y + jnp.where(valid, d.astype(jnp.float32)[:, None] * x.astype(jnp.float32), 0)
    return y.astype(x.dtype)
