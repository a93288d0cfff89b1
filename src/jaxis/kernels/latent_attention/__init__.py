"""Attention of a flat batch of tokens over a paged cache of latents (multi-head latent attention, arXiv:2405.04434).

All heads share one entry per token, a compressed latent and a rope key. Keys and values are linear in the latent, so
they are never materialized: the key projection is absorbed into the queries, the value projection into the output.
`reference.py` is the definition; `blockwise.py` (any platform), `cpu.py` and `gpu.py` are faster. `cpu.py` and
`selected.py` (any platform) attend to selected tokens (`kernels/index_selection`).
"""

from __future__ import annotations

from typing import Any

import jax
from jax.typing import DTypeLike

from jaxis.kernels.batch import Batch
from jaxis.kernels.latent_attention import blockwise, cpu, layout, selected
from jaxis.kernels.paged_cache import CacheLayout, PagedCache
from jaxis.kernels.platform import supports_triton

__all__ = ["latent_attention", "latent_cache_layout"]


def latent_cache_layout(block_size: int, value_dim: int, rope_dim: int, dtype: DTypeLike) -> CacheLayout:
    """Returns the cache layout that `latent_attention` expects in a program traced under the current mesh.

    `value_dim` and `rope_dim` are the elements of a latent and of a rope key. The type is float32, bfloat16, float16,
    or int8 with two float32 scales per entry.
    """
    chosen = cpu if cpu.supports(value_dim, rope_dim, dtype) else layout
    return chosen.latent_cache_layout(block_size, value_dim + rope_dim, dtype)


def latent_attention(
    q: jax.Array,
    entries: jax.Array,
    kv_cache: PagedCache,
    batch: Batch,
    selection: jax.Array | None = None,
    *,
    value_dim: int,
    scale: float,
    sinks: jax.Array | None = None,
) -> tuple[PagedCache, jax.Array]:
    """Writes this step's entries into the cache, then attends to it.

    A query's scores are its products with whole entries; the values are the entries' first `value_dim` elements.

    Args:
      q: [T, H, D].
      entries: [T, D].
      kv_cache: Cache with a layout of `latent_cache_layout`. It is updated in place if donated.
      batch: The step's tokens and requests.
      selection: i32 [T, K], the positions that each token attends to, ascending, then -1: all up to itself for tokens
        at positions below K. None: each token attends to all tokens up to itself.
      value_dim: Elements of a latent, at most D.
      scale: Multiplies the scores.
      sinks: [H], one extra score per head that has no value but takes part in the softmax.

    Returns:
      The updated cache, and [T, H, value_dim] in q's type (padding rows are finite and meaningless).
    """
    options: Any = {"value_dim": value_dim, "scale": scale, "sinks": sinks}
    array, cache_layout = kv_cache.array, kv_cache.layout
    if cache_layout.kernels == "native":
        array, out = cpu.latent_attention(q, entries, array, batch, selection, **options)
        return cache_layout.cache(array), out
    array = layout.write_latent_cache(array, entries, value_dim, batch)
    kv_cache = cache_layout.cache(array)
    if selection is not None:
        return kv_cache, selected.latent_attention(q, array, batch, selection, **options)
    if supports_triton():
        from jaxis.kernels.latent_attention import gpu

        if gpu.supports(q, array, value_dim):
            return kv_cache, gpu.latent_attention(q, array, batch, **options)
    return kv_cache, blockwise.latent_attention(q, array, batch, **options)
