"""Ragged paged attention on TPU: JAX's own Pallas kernel."""

from __future__ import annotations

import jax
from jax.experimental.pallas.ops.tpu import ragged_paged_attention as pallas_kernel

# The kernel loads whole vector lanes, which a head must fill.
HEAD_DIM_MULTIPLE = 128


def supports(q: jax.Array, kv_cache: jax.Array) -> bool:
    """Whether the kernel takes these shapes and types."""
    return q.shape[-1] % HEAD_DIM_MULTIPLE == 0 and q.dtype == kv_cache.dtype


def ragged_paged_attention(
    q: jax.Array,
    kv_cache: jax.Array,
    seq_lens: jax.Array,
    block_tables: jax.Array,
    query_start_loc: jax.Array,
    request_distribution: jax.Array,
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
) -> jax.Array:
    """Attention of each query to its request's cached tokens up to its own position.

    Same arguments and result as `jaxis.kernels.ragged_paged_attention.ragged_paged_attention`.
    """
    return pallas_kernel.ragged_paged_attention(
        q,
        kv_cache,
        seq_lens,
        block_tables,
        query_start_loc,
        request_distribution[2:],
        sm_scale=scale,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
    )
