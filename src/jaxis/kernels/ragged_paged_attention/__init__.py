"""Attention of a flat batch of tokens over a paged KV cache: prefill, chunked prefill and decode in one call.

`reference.py` is the definition; `blockwise.py` (any platform), `cpu.py`, `gpu.py` and `tpu.py` compute it faster.
`cpu.py` and `tpu.py` have cache layouts of their own.
"""

from __future__ import annotations

from typing import Any

import jax
from jax.typing import DTypeLike

from jaxis.config.attention_span import FULL_CONTEXT, AttentionSpan
from jaxis.kernels.batch import Batch
from jaxis.kernels.paged_cache import CacheLayout, PagedCache
from jaxis.kernels.platform import supports_triton, target_platform
from jaxis.kernels.ragged_paged_attention import blockwise, cpu, layout, tpu_layout

__all__ = ["kv_cache_layout", "ragged_paged_attention"]


def kv_cache_layout(block_size: int, num_kv_heads: int, head_dim: int, dtype: DTypeLike) -> CacheLayout:
    """Returns the cache layout that `ragged_paged_attention` expects in a program traced under the current mesh.

    The cache has blocks of B tokens, K heads and D dimensions. The type is float32, bfloat16, float16, or int8 with a
    float32 scale for each key and value.
    """
    if target_platform() == "tpu":
        return tpu_layout.kv_cache_layout(block_size, num_kv_heads, head_dim, dtype)
    chosen = cpu if cpu.supports(block_size, head_dim, dtype) else layout
    return chosen.kv_cache_layout(block_size, num_kv_heads, head_dim, dtype)


def ragged_paged_attention(
    q: jax.Array,
    k: jax.Array | None,
    v: jax.Array | None,
    kv_cache: PagedCache,
    batch: Batch,
    *,
    scale: float,
    span: AttentionSpan = FULL_CONTEXT,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    bias: jax.Array | None = None,
) -> tuple[PagedCache, jax.Array]:
    """Writes this step's keys and values into the cache, then attends to it.

    Args:
      q: [T, H, D].
      k: [T, K, D]; None, with `v`, if the cache has this step's keys and values already because another layer wrote
        them. Then nothing is written.
      v: [T, K, D] or None.
      kv_cache: Cache with a layout of `kv_cache_layout`. It is updated in place if donated.
      batch: The step's tokens and requests.
      scale: Multiplies the scores.
      span: The tokens that a token sees.
      soft_cap: Scores become `soft_cap * tanh(scores / soft_cap)`.
      sinks: float [H], one extra score per head that has no value but takes part in the softmax; [T, H] if each token
        has its own.
      bias: [T, H, N], added to the scores before the soft cap: entry n to that of the key n tokens before; 0 beyond N.

    Returns:
      The updated cache, and the attention output [T, H, D] in q's type (padding rows are finite and meaningless).
    """
    options: dict[str, Any] = {"scale": scale, "span": span, "soft_cap": soft_cap, "sinks": sinks, "bias": bias}
    array, cache_layout = kv_cache.array, kv_cache.layout
    if cache_layout.kernels == "native":
        array, out = cpu.ragged_paged_attention(q, k, v, array, batch, **options)
        return cache_layout.cache(array), out
    if cache_layout.kernels == "tpu":
        from jaxis.kernels.ragged_paged_attention import tpu

        block_size = cache_layout.block_size
        array, out = tpu.ragged_paged_attention(q, k, v, array, batch, block_size=block_size, **options)
        return cache_layout.cache(array), out
    if k is not None and v is not None:
        array = layout.write_kv_cache(array, k, v, batch)
    kernel = blockwise
    if supports_triton():
        from jaxis.kernels.ragged_paged_attention import gpu

        if span.is_causal and bias is None and (sinks is None or sinks.ndim == 1) and gpu.supports(q, array):
            kernel = gpu
            del options["bias"]
    return cache_layout.cache(array), kernel.ragged_paged_attention(q, array, batch, **options)
