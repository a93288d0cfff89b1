"""Attention of a flat batch of tokens over a paged KV cache: prefill, chunked prefill and decode in one call.

`reference.py` is the definition; `blockwise.py` (any platform), `cpu.py`, `gpu.py` and `tpu.py` compute it faster.
The caches of `cpu.py` and `tpu.py` have layouts of their own.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxis.config.attention_span import FULL_CONTEXT, AttentionSpan
from jaxis.kernels import native
from jaxis.kernels.platform import supports_triton, target_platform
from jaxis.kernels.ragged_paged_attention import blockwise, cpu, layout, tpu_layout

__all__ = ["kv_cache_shape", "kv_head_axis", "make_kv_cache", "num_cached_heads", "ragged_paged_attention"]


def kv_cache_shape(
    num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: DTypeLike
) -> tuple[int, ...]:
    """The shape of the cache that `ragged_paged_attention` expects in a program traced under the current mesh.

    Args:
      num_blocks: The number of blocks.
      block_size: B, tokens per block.
      num_kv_heads: K.
      head_dim: D.
      dtype: float32, bfloat16, float16, or int8 with a float32 scale for each key and value.

    Returns:
      Three axes [num_blocks, K, N] for the native CPU kernel (`cpu.py`), otherwise four (`layout.py`; on TPU
      `tpu_layout.py`).

    Raises:
      ConfigError: There is no layout on TPU for blocks of this size.
    """
    if _has_tpu_layout(dtype):
        page = tpu_layout.PageLayout.of_heads(block_size, head_dim, dtype)
        return page.cache_shape(num_blocks, num_kv_heads)
    chosen = cpu if cpu.supports(block_size, head_dim, dtype) else layout
    return chosen.kv_cache_shape(num_blocks, block_size, num_kv_heads, head_dim, dtype)


def kv_head_axis(dtype: DTypeLike) -> int:
    """The axis of a cache of this type along which its kv heads may be split over devices."""
    return 1 if _has_tpu_layout(dtype) else -2


def num_cached_heads(kv_cache: jax.Array) -> int:
    """K of a cache: the model's kv heads, or more if each of several devices has a copy of one."""
    if kv_cache.ndim == cpu.CACHE_AXES:
        return kv_cache.shape[1]
    return kv_cache.shape[1] if _has_tpu_layout(kv_cache.dtype) else kv_cache.shape[2] // 2


def _has_tpu_layout(dtype: DTypeLike) -> bool:
    return target_platform() == "tpu" and tpu_layout.supports(dtype)


def make_kv_cache(shape: tuple[int, ...], dtype: DTypeLike, sharding: jax.sharding.Sharding) -> jax.Array:
    """A cache with a shape from `kv_cache_shape`; its initial content is meaningless."""
    # States may have as many axes, on any platform.
    if len(shape) == cpu.CACHE_AXES and target_platform() == "cpu" and native.library() is not None:
        return cpu.make_kv_cache(shape, dtype, sharding)
    return jnp.zeros(shape, dtype, device=sharding)


def ragged_paged_attention(
    q: jax.Array,
    k: jax.Array | None,
    v: jax.Array | None,
    kv_cache: jax.Array,
    positions: jax.Array,
    seq_lens: jax.Array,
    block_tables: jax.Array,
    query_start_loc: jax.Array,
    request_distribution: jax.Array,
    *,
    scale: float,
    span: AttentionSpan = FULL_CONTEXT,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Writes this step's keys and values into the cache, then attends to it.

    Args:
      q: [T, H, D].
      k: [T, K, D]; None, with `v`, if this step's keys and values are in the cache already. Then nothing is written:
        the layer reads what another one has cached.
      v: [T, K, D] or None.
      kv_cache: Its shape is from `kv_cache_shape`. Donate it, and it is updated in place.
      positions: i32 [T], each token's position in its sequence.
      seq_lens: i32 [R], each request's length after this step.
      block_tables: i32 [R, max_blocks], the blocks that hold each request's tokens, in order.
      query_start_loc: i32 [R + 1]; request r's tokens are rows [r] to [r + 1] of the flat batch.
      request_distribution: i32 [3]: requests up to the first are decodes (one token each), up to the second prefills,
        up to the third either; the third is the number of requests. Rows and requests past it are padding.
      scale: Multiplies the scores.
      span: The tokens that a token sees.
      soft_cap: Scores become `soft_cap * tanh(scores / soft_cap)`.
      sinks: float [H], one extra score per head that has no value but takes part in the softmax.

    Returns:
      The updated cache, and the attention output [T, H, D] in q's type (padding rows are finite and meaningless).
    """
    operands = (seq_lens, block_tables, query_start_loc, request_distribution)
    options: dict[str, Any] = {"scale": scale, "span": span, "soft_cap": soft_cap, "sinks": sinks}
    if kv_cache.ndim == cpu.CACHE_AXES:
        return cpu.ragged_paged_attention(q, k, v, kv_cache, *operands, **options)
    if _has_tpu_layout(kv_cache.dtype):
        from jaxis.kernels.ragged_paged_attention import tpu

        return tpu.ragged_paged_attention(q, k, v, kv_cache, *operands, **options)
    if k is not None and v is not None:
        kv_cache = layout.write_kv_cache(kv_cache, k, v, positions, *operands[1:])
    if supports_triton():
        from jaxis.kernels.ragged_paged_attention import gpu

        if gpu.supports(q, kv_cache):
            return kv_cache, gpu.ragged_paged_attention(q, kv_cache, *operands, **options)
    return kv_cache, blockwise.ragged_paged_attention(q, kv_cache, *operands, **options)
