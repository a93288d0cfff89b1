"""Mamba's selective scan for GPU and TPU: decodes together, and prefills token by token within chunks.

Each element of a state decays at its own rate, so a chunk is a loop with a state, and no matrix product as in Mamba2.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from jaxis.kernels.selective_scan import reference
from jaxis.kernels.state_chunks import run_chunks

CHUNK_SIZE = 64
UNROLLED_TOKENS = 8


def selective_scan(operands: reference.ScanOperands) -> tuple[jax.Array | None, jax.Array]:
    x = operands.x
    token_step = functools.partial(reference.token_step, operands.a.T, operands.d.astype(jnp.float32))

    def chunk_step(state: jax.Array, rows: reference.ScanInputs, num_tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        valid = jnp.arange(rows.x.shape[0]) < num_tokens
        # Padding neither decays, since its time step is 0, nor adds.
        rows = reference.ScanInputs(*(jnp.where(valid[:, None], row, 0) for row in rows))
        return jax.lax.scan(token_step, state, rows, unroll=UNROLLED_TOKENS)

    state, y = run_chunks(
        chunk_step,
        token_step,
        operands.states,
        operands.a.T.shape,
        reference.ScanInputs.of(operands),
        x.shape[1:],
        chunk_size=CHUNK_SIZE,
    )
    return state, y.astype(x.dtype)
