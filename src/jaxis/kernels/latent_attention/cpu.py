"""Latent attention on CPU: the native kernel. `layout.py` describes the layout of its cache."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxis.kernels import native
from jaxis.kernels.batch import Batch
from jaxis.kernels.latent_attention import layout
from jaxis.kernels.native_constants import ATTENTION_TILE
from jaxis.kernels.paged_cache import CacheLayout

CACHE_DTYPES = (jnp.float32, jnp.bfloat16, jnp.int8)


def supports(value_dim: int, rope_dim: int, dtype: DTypeLike) -> bool:
    return (
        native.usable() and value_dim % ATTENTION_TILE == 0 and rope_dim % ATTENTION_TILE == 0 and dtype in CACHE_DTYPES
    )


def latent_cache_layout(block_size: int, head_dim: int, dtype: DTypeLike) -> CacheLayout:
    shape = (1, block_size * layout.entry_size(head_dim, dtype))
    return CacheLayout("native", block_size, 1, shape, np.dtype(dtype), (None, None))


def latent_attention(
    q: jax.Array,
    entries: jax.Array,
    kv_cache: jax.Array,
    batch: Batch,
    selection: jax.Array | None = None,
    *,
    value_dim: int,
    scale: float,
    sinks: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    block_size = kv_cache.shape[2] // layout.entry_size(q.shape[-1], kv_cache.dtype)
    kv_cache, out = native.call(
        "latent_attention" if selection is None else "selected_latent_attention",
        (
            jax.ShapeDtypeStruct(kv_cache.shape, kv_cache.dtype),
            jax.ShapeDtypeStruct((*q.shape[:2], value_dim), jnp.float32),
        ),
        q.astype(jnp.float32),
        entries.astype(jnp.float32),
        kv_cache,
        *batch.of_requests,
        jnp.zeros(0, jnp.float32) if sinks is None else sinks.astype(jnp.float32),
        *([] if selection is None else [selection]),
        aliases={2: 0},
        block_size=np.int64(block_size),
        scale=np.float32(scale),
    )
    return kv_cache, out.astype(q.dtype)
