"""Attention of a flat batch of tokens over a paged cache of latents (multi-head latent attention, arXiv:2405.04434).

All heads share one entry per token, a compressed latent and a rope key. Keys and values are linear in the latent, so
they are never materialized: the key projection is absorbed into the queries, the value projection into the output.
`reference.py` is the definition; `blockwise.py` (any platform), `cpu.py`, `gpu.py` and `tpu.py` compute the same fast.
Attention to selected tokens only (see `kernels/index_selection`) is in `cpu.py` and `selected.py` (any platform).
"""

from __future__ import annotations

import jax
from jax.typing import DTypeLike

from jaxis.kernels.latent_attention import blockwise, cpu, layout, selected
from jaxis.kernels.platform import supports_triton, target_platform
from jaxis.kernels.ragged_paged_attention import tpu_layout

__all__ = ["latent_attention", "latent_cache_shape"]


def latent_cache_shape(
    num_blocks: int, block_size: int, value_dim: int, rope_dim: int, dtype: DTypeLike, *, is_gathered: bool = False
) -> tuple[int, ...]:
    """The shape of the cache that `latent_attention` expects in a program traced under the current mesh.

    Args:
      num_blocks: The number of blocks.
      block_size: B, tokens per block.
      value_dim: Elements of a compressed latent.
      rope_dim: Elements of a rope key.
      dtype: float32, bfloat16, float16, or int8 with two float32 scales per entry.
      is_gathered: Whether attention is to selected tokens, whose entries are read one by one.

    Raises:
      ConfigError: There is no layout on TPU for blocks of this size.
    """
    if _has_tpu_layout(dtype) and not is_gathered:
        page = tpu_layout.PageLayout.of_latents(block_size, value_dim, rope_dim, dtype)
        return page.cache_shape(num_blocks, num_kv_heads=1)
    chosen = cpu if cpu.supports(value_dim, rope_dim, dtype) else layout
    return chosen.latent_cache_shape(num_blocks, block_size, value_dim + rope_dim, dtype)


def _has_tpu_layout(dtype: DTypeLike) -> bool:
    return target_platform() == "tpu" and tpu_layout.supports(dtype)


def latent_attention(
    q: jax.Array,
    entries: jax.Array,
    kv_cache: jax.Array,
    positions: jax.Array,
    seq_lens: jax.Array,
    block_tables: jax.Array,
    query_start_loc: jax.Array,
    request_distribution: jax.Array,
    selection: jax.Array | None = None,
    *,
    value_dim: int,
    scale: float,
) -> tuple[jax.Array, jax.Array]:
    """Writes this step's entries into the cache, then attends to it.

    A query's scores are its products with whole entries; the values are the entries' first `value_dim` elements.

    Args:
      q: [T, H, D].
      entries: [T, D].
      kv_cache: Its shape is from `latent_cache_shape`. Donate it, and it is updated in place.
      positions: i32 [T], each token's position in its sequence.
      seq_lens: i32 [R], each request's length after this step.
      block_tables: i32 [R, max_blocks], the blocks that hold each request's tokens, in order.
      query_start_loc: i32 [R + 1]; request r's tokens are rows [r] to [r + 1] of the flat batch.
      request_distribution: i32 [3]: requests up to the first are decodes (one token each), up to the second prefills,
        up to the third either; the third is the number of requests. Rows and requests past it are padding.
      selection: i32 [T, K], the positions that each token attends to, ascending, then -1: all up to itself for tokens
        at positions below K, and just K for the others. None: each token attends to all up to itself.
      value_dim: Elements of a latent, at most D.
      scale: Multiplies the scores.

    Returns:
      The updated cache, and [T, H, value_dim] in q's type (padding rows are finite and meaningless).
    """
    operands = (seq_lens, block_tables, query_start_loc, request_distribution)
    if kv_cache.ndim == cpu.CACHE_AXES:
        return cpu.latent_attention(q, entries, kv_cache, *operands, selection, value_dim=value_dim, scale=scale)
    if _has_tpu_layout(kv_cache.dtype) and selection is None:
        from jaxis.kernels.latent_attention import tpu

        return tpu.latent_attention(q, entries, kv_cache, *operands, value_dim=value_dim, scale=scale)
    kv_cache = layout.write_latent_cache(
        kv_cache, entries, value_dim, positions, block_tables, query_start_loc, request_distribution
    )
    if selection is not None:
        out = selected.latent_attention(q, kv_cache, *operands[1:], selection, value_dim=value_dim, scale=scale)
        return kv_cache, out
    if supports_triton():
        from jaxis.kernels.latent_attention import gpu

        if gpu.supports(q, kv_cache, value_dim):
            return kv_cache, gpu.latent_attention(q, kv_cache, *operands, value_dim=value_dim, scale=scale)
    return kv_cache, blockwise.latent_attention(q, kv_cache, *operands, value_dim=value_dim, scale=scale)
