"""The gated delta rule in chunks of tokens (arXiv:2412.06464, section 3.3), mostly as matrix products.

The updates u of a chunk's tokens solve a triangular system: each is beta * (v - k S), where S contains the earlier
updates. Token i reads token j's update, weighted by the product of the decays between them.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from jaxis.kernels.delta_rule import reference
from jaxis.kernels.state_chunks import run_chunks, sums_between

CHUNK_SIZE = 64
CHANNEL_CHUNK_SIZE = 16
"""Tokens of a chunk with one decay per channel, whose weights are [C, C, dk] for each head."""

_einsum = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)


def gated_delta_rule(
    operands: reference.DeltaRuleOperands, *, l2_norm_epsilon: float | None, scale: float
) -> tuple[jax.Array | None, jax.Array]:
    v = operands.v
    state, out = run_chunks(
        _chunk_step,
        reference.token_step,
        operands.states,
        operands.state_shape,
        reference.DeltaRuleInputs.of(operands, l2_norm_epsilon, scale),
        v.shape[1:],
        chunk_size=CHANNEL_CHUNK_SIZE if operands.log_decay.ndim == 3 else CHUNK_SIZE,
    )
    return state, out.astype(v.dtype)


def _chunk_step(
    state: jax.Array, rows: reference.DeltaRuleInputs, num_tokens: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Computes a chunk of C tokens: state [Hv, dk, dv], outputs [C, Hv, dv]."""
    q, k, v, log_decay, beta = _by_head(rows, num_tokens)
    between = jnp.exp(jax.vmap(sums_between)(log_decay))  # [Hv, C, C, 1 or dk]
    decays = jnp.exp(jnp.cumsum(log_decay, axis=1))
    if log_decay.shape[2] == 1:
        by_key = _einsum("hid,hjd->hij", k, k) * between[..., 0]
        by_query = _einsum("hid,hjd->hij", q, k) * between[..., 0]
    else:
        weighted = between * k[:, None]
        by_key = _einsum("hid,hijd->hij", k, weighted)
        by_query = _einsum("hid,hijd->hij", q, weighted)
    errors = beta[..., None] * (v - _einsum("hid,hde->hie", k * decays, state))
    system = jnp.tril(beta[..., None] * by_key, -1)
    updates = jax.lax.linalg.triangular_solve(system, errors, left_side=True, lower=True, unit_diagonal=True)
    out = _einsum("hid,hde->hie", q * decays, state) + _einsum("hij,hje->hie", by_query, updates)
    state = state * decays[:, -1, :, None] + _einsum("hid,hie->hde", k * between[:, -1], updates)
    return state, out.swapaxes(0, 1)


def _by_head(rows: reference.DeltaRuleInputs, num_tokens: jax.Array) -> tuple[jax.Array, ...]:
    """Returns q, k, v, log decays [Hv, C, ...] and beta [Hv, C]. Padding neither decays the state nor updates it."""
    group_size = rows.v.shape[1] // rows.k.shape[1]
    valid = jnp.arange(rows.k.shape[0]) < num_tokens
    q, k, v, log_decay, beta = (jnp.where(valid.reshape(-1, *[1] * (x.ndim - 1)), x, 0).swapaxes(0, 1) for x in rows)
    q, k = (jnp.repeat(x, group_size, axis=0) for x in (q, k))
    return q, k, v, log_decay, beta
