"""Definition of the gated delta rule in plain JAX: token by token, in float32."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxis.kernels.state_slots import RecurrentStates
from jaxis.kernels.token_scan import scan_tokens


class DeltaRuleOperands(NamedTuple):
    """Operands of `gated_delta_rule`, for a flat batch of T tokens.

    Attributes:
      q, k: [T, Hk, dk].
      v: [T, Hv, dv]; Hv / Hk consecutive value heads share a key head.
      log_decay: float32 [T, Hv], the logarithm of the decay, at most 0; [T, Hv, dk] for a decay of each row of S.
      beta: float32 [T, Hv].
      states: States, float32 [Hv, dk, dv] each.
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    log_decay: jax.Array
    beta: jax.Array
    states: RecurrentStates

    @property
    def state_shape(self) -> tuple[int, ...]:
        return (self.v.shape[1], self.k.shape[2], self.v.shape[2])


class DeltaRuleInputs(NamedTuple):
    """Inputs of one token, or of many with a leading axis; queries and keys are normalized and scaled."""

    q: jax.Array  # [Hk, dk]
    k: jax.Array  # [Hk, dk]
    v: jax.Array  # [Hv, dv]
    log_decay: jax.Array  # [Hv, 1], or [Hv, dk] for a decay of each row of the state
    beta: jax.Array  # [Hv]

    @classmethod
    def of(cls, operands: DeltaRuleOperands, l2_norm_epsilon: float | None, scale: float) -> DeltaRuleInputs:
        """Returns the inputs in float32: q and k are divided by their length with an epsilon, then q is scaled."""
        q, k, v, log_decay, beta, _ = operands
        q, k = q.astype(jnp.float32), k.astype(jnp.float32)
        if l2_norm_epsilon is not None:
            q, k = (x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + l2_norm_epsilon) for x in (q, k))
        inputs = cls(q * scale, k, v, log_decay.reshape(*v.shape[:2], -1), beta)
        return cls(*(x.astype(jnp.float32) for x in inputs))


def gated_delta_rule(
    operands: DeltaRuleOperands, *, l2_norm_epsilon: float | None, scale: float
) -> tuple[jax.Array | None, jax.Array]:
    inputs = DeltaRuleInputs.of(operands, l2_norm_epsilon, scale)
    state, out = scan_tokens(token_step, operands.states, operands.state_shape, inputs)
    return state, out.astype(operands.v.dtype)


def token_step(state: jax.Array, token: DeltaRuleInputs) -> tuple[jax.Array, jax.Array]:
    """Returns the state [Hv, dk, dv] after a token, and the token's output [Hv, dv]."""
    group_size = token.v.shape[0] // token.k.shape[0]
    q, k = (jnp.repeat(x, group_size, axis=0) for x in (token.q, token.k))
    state = state * jnp.exp(token.log_decay)[:, :, None]
    update = token.beta[:, None] * (token.v - _read(k, state))
    state = state + k[:, :, None] * update[:, None, :]
    return state, _read(q, state)


def _read(key: jax.Array, state: jax.Array) -> jax.Array:
    return jnp.einsum("hk,hkv->hv", key, state, precision=jax.lax.Precision.HIGHEST)
