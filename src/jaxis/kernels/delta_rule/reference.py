"""Definition of the gated delta rule in plain JAX: token by token, in float32."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxis.kernels.state_slots import StateSlots, TokenSlots
from jaxis.kernels.token_scan import scan_tokens


class DeltaRuleInputs(NamedTuple):
    """Inputs of one token, or of many with a leading axis; queries and keys are normalized and scaled."""

    q: jax.Array  # [Hk, dk]
    k: jax.Array  # [Hk, dk]
    v: jax.Array  # [Hv, dv]
    log_decay: jax.Array  # [Hv, 1], or [Hv, dk] for a decay of each row of the state
    beta: jax.Array  # [Hv]

    def upcast(self) -> DeltaRuleInputs:
        return DeltaRuleInputs(*(x.astype(jnp.float32) for x in self))


def gated_delta_rule(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    log_decay: jax.Array,
    beta: jax.Array,
    state: jax.Array | None,
    slots: StateSlots | None,
    query_start_loc: jax.Array,
    num_requests: jax.Array,
    *,
    l2_norm_epsilon: float | None,
    scale: float,
) -> tuple[jax.Array | None, jax.Array]:
    num_tokens, num_heads, value_dim = v.shape
    q, k = normalized(q, k, l2_norm_epsilon=l2_norm_epsilon, scale=scale)
    inputs = DeltaRuleInputs(q, k, v, log_decay.reshape(num_tokens, num_heads, -1), beta).upcast()
    tokens = TokenSlots.of(slots, query_start_loc, num_requests, num_tokens)
    state, out = scan_tokens(token_step, state, (num_heads, k.shape[2], value_dim), tokens, inputs)
    return state, out.astype(v.dtype)


def normalized(
    q: jax.Array, k: jax.Array, *, l2_norm_epsilon: float | None, scale: float
) -> tuple[jax.Array, jax.Array]:
    """Returns queries times `scale`, and keys, in float32. With an epsilon, both are first divided by their length."""
    q, k = q.astype(jnp.float32), k.astype(jnp.float32)
    if l2_norm_epsilon is not None:
        q, k = (x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + l2_norm_epsilon) for x in (q, k))
    return q * scale, k


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
