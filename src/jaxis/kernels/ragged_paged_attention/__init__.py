"""Attention of a flat batch of tokens over a paged KV cache: prefill, chunked prefill and decode in one call.

`reference.py` is the definition; `blockwise.py` (any platform) and `tpu.py` compute the same faster.
"""

from __future__ import annotations

import jax

from jaxis.kernels.ragged_paged_attention import blockwise
from jaxis.kernels.ragged_paged_attention.layout import write_kv_cache

__all__ = ["ragged_paged_attention"]


def ragged_paged_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    kv_cache: jax.Array,
    positions: jax.Array,
    seq_lens: jax.Array,
    block_tables: jax.Array,
    query_start_loc: jax.Array,
    request_distribution: jax.Array,
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Writes this step's keys and values into the cache, then attends to it.

    Args:
      q: [T, H, D].
      k, v: [T, K, D].
      kv_cache: [num_blocks, block_size, 2 * K, D]; see `layout.py`.
      positions: i32 [T], each token's place in its own sequence.
      seq_lens: i32 [R], each request's tokens after this step.
      block_tables: i32 [R, max_blocks], the blocks that hold each request's tokens, in order.
      query_start_loc: i32 [R + 1]; request r's tokens are rows [r] to [r + 1] of the flat batch.
      request_distribution: i32 [3]: requests up to the first are decodes (one token each), up to the second prefills,
        up to the third either; the third is the number of requests. Rows and requests past it are padding.
      scale: Multiplies the scores.
      sliding_window: A token sees itself and this many - 1 before it; None sees all.
      soft_cap: Scores become `soft_cap * tanh(scores / soft_cap)`.

    Returns:
      The updated cache, and the attention output [T, H, D] in q's type (padding rows are finite and meaningless).
    """
    kv_cache = write_kv_cache(kv_cache, k, v, positions, block_tables, query_start_loc, request_distribution)
    attend = blockwise.ragged_paged_attention
    if jax.default_backend() == "tpu":
        from jaxis.kernels.ragged_paged_attention import tpu

        if tpu.supports(q, kv_cache):
            attend = tpu.ragged_paged_attention
    out = attend(
        q,
        kv_cache,
        seq_lens,
        block_tables,
        query_start_loc,
        request_distribution,
        scale=scale,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
    )
    return kv_cache, out
