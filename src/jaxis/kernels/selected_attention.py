"""Attention of grouped queries to selected tokens of a paged cache, by the kernels of latent attention.

Those read tokens one by one. Each kv head is cached as latents of its own: a token's value, then its key, so that a
query with zeros before it has the scores of its keys alone. With K heads the cache is [num_blocks, K, ...]; block b of
head h is block b * K + h of the latents.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxis.kernels.batch import Batch
from jaxis.kernels.latent_attention import latent_attention, latent_cache_layout
from jaxis.kernels.paged_cache import CacheLayout, PagedCache


def selected_cache_layout(block_size: int, num_kv_heads: int, head_dim: int, dtype: DTypeLike) -> CacheLayout:
    """Returns the layout of the cache of `selected_attention`, for K heads of keys and values of D elements each."""
    latents = latent_cache_layout(block_size, head_dim, head_dim, dtype)
    return dataclasses.replace(
        latents,
        num_heads=num_kv_heads,
        shape=(num_kv_heads, *latents.shape),
        axes=("kv_heads", *latents.axes),
    )


def selected_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    kv_cache: PagedCache,
    batch: Batch,
    selection: jax.Array,
    *,
    scale: float,
) -> tuple[PagedCache, jax.Array]:
    """Writes this step's keys and values into the cache, then attends to selected tokens of it.

    Takes q [T, H, D], keys and values [T, K, D], and `selection`, i32 [T, N] as in `latent_attention`, or [T, K, N]
    with one of each kv head. Other arguments are those of `latent_attention`. Returns the updated cache, and [T, H, D]
    in q's type.
    """
    array, layout = kv_cache.array, kv_cache.layout
    num_kv_heads, head_dim = array.shape[1], q.shape[-1]
    latents = dataclasses.replace(layout, num_heads=1, shape=array.shape[2:], axes=layout.axes[1:])
    cache = latents.cache(array.reshape(-1, *array.shape[2:]))
    entries = jnp.concatenate([v, k], axis=-1)
    queries = jnp.pad(q, ((0, 0), (0, 0), (head_dim, 0))).reshape(q.shape[0], num_kv_heads, -1, 2 * head_dim)
    outputs = []
    for head in range(num_kv_heads):
        cache, out = latent_attention(
            queries[:, head],
            entries[:, head],
            cache,
            batch._replace(block_tables=batch.block_tables * num_kv_heads + head),
            selection if selection.ndim == 2 else selection[:, head],
            value_dim=head_dim,
            scale=scale,
        )
        if layout.kernels != "native":
            # XLA would copy the cache, did the next head's write not wait for this head's reads.
            cache, out = jax.lax.optimization_barrier((cache, out))
        outputs.append(out)
    return layout.cache(cache.array.reshape(array.shape)), jnp.concatenate(outputs, axis=1)
