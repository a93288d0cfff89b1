"""Mamba2's recurrence in chunks of tokens (arXiv:2405.21060, section 6), mostly as matrix products.

Token i reads token j's input, weighted by the product of the decays between them.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from jaxis.kernels.ssd import reference
from jaxis.kernels.state_chunks import run_chunks, sums_between

CHUNK_SIZE = 64

_einsum = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)


def ssd(operands: reference.SsdOperands) -> tuple[jax.Array | None, jax.Array]:
    state, y = run_chunks(
        _chunk_step,
        reference.token_step,
        operands.states,
        operands.state_shape,
        reference.SsdInputs.of(operands),
        operands.x.shape[1:],
        chunk_size=CHUNK_SIZE,
    )
    return state, reference.with_skip(y, operands)


def _chunk_step(state: jax.Array, rows: reference.SsdInputs, num_tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Computes a chunk of C tokens: state [H, P, N], outputs [C, H, P]."""
    num_rows, num_heads, _ = rows.x.shape
    num_groups = rows.b.shape[1]
    valid = jnp.arange(num_rows) < num_tokens
    # Padding neither decays nor adds.
    x, log_decay, b, c = (jnp.where(valid.reshape(-1, *[1] * (x.ndim - 1)), x, 0) for x in rows)
    sums = jnp.cumsum(log_decay, axis=0)  # [C, H]
    weights = jnp.exp(sums_between(log_decay))  # [C, C, H]
    group_size = num_heads // num_groups
    reads = jnp.repeat(_einsum("ign,jgn->ijg", c, b), group_size, axis=2) * weights
    b, c = (jnp.repeat(vectors, group_size, axis=1) for vectors in (b, c))
    y = _einsum("ijh,jhp->ihp", reads, x) + _einsum("ihn,hpn->ihp", c * jnp.exp(sums)[..., None], state)
    state = state * jnp.exp(sums[-1])[:, None, None] + _einsum("ihp,ihn->hpn", x, b * weights[-1][..., None])
    return state, y
