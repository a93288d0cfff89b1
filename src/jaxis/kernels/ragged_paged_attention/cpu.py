"""Ragged paged attention on CPU: the native kernel, and the layout of its cache.

A layer's cache is `[num_blocks, K, N]`. The N elements of a head in a block are its keys, in transposed 16-token tiles
`[block_size / 16, D, 16]`, then its values `[block_size, D]`; in an int8 cache, the float32 scales of the keys
`[block_size]` and of the values `[block_size]` follow. The kernel thus reads each head contiguously, and a vector
register holds one dimension of 16 keys. D is a multiple of 16: other heads are cached with zeros behind them.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxis.config.attention_span import FULL_CONTEXT, AttentionSpan
from jaxis.kernels import native
from jaxis.kernels.batch import Batch
from jaxis.kernels.head_tiles import padded, whole_tiles
from jaxis.kernels.native_constants import ATTENTION_TILE, MAX_HEAD_DIM
from jaxis.kernels.paged_cache import CacheLayout

CACHE_DTYPES = (jnp.float32, jnp.bfloat16, jnp.int8)
SCALE_BYTES = 4
UNLIMITED = 1 << 40  # tokens


def supports(block_size: int, head_dim: int, dtype: DTypeLike) -> bool:
    return native.usable() and block_size % ATTENTION_TILE == 0 and head_dim <= MAX_HEAD_DIM and dtype in CACHE_DTYPES


def kv_cache_layout(block_size: int, num_kv_heads: int, head_dim: int, dtype: DTypeLike) -> CacheLayout:
    scales = 2 * block_size * SCALE_BYTES if dtype == jnp.int8 else 0
    shape = (num_kv_heads, 2 * block_size * whole_tiles(head_dim) + scales)
    return CacheLayout("native", block_size, num_kv_heads, shape, np.dtype(dtype), ("kv_heads", None))


def ragged_paged_attention(
    q: jax.Array,
    k: jax.Array | None,
    v: jax.Array | None,
    kv_cache: jax.Array,
    batch: Batch,
    *,
    scale: float,
    span: AttentionSpan = FULL_CONTEXT,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    bias: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    given_dim = q.shape[-1]
    head_dim = whole_tiles(given_dim)
    if k is None or v is None:
        # No rows: the kernel writes nothing.
        k = v = jnp.zeros((0, kv_cache.shape[1], head_dim), jnp.float32)
    entry_bytes = head_dim * kv_cache.dtype.itemsize + (SCALE_BYTES if kv_cache.dtype == jnp.int8 else 0)
    block_size = kv_cache.shape[2] * kv_cache.dtype.itemsize // (2 * entry_bytes)
    queries, keys, values = (padded(x.astype(jnp.float32)) for x in (q, k, v))
    kv_cache, out = native.call(
        "paged_attention",
        (jax.ShapeDtypeStruct(kv_cache.shape, kv_cache.dtype), jax.ShapeDtypeStruct(queries.shape, jnp.float32)),
        queries,
        keys,
        values,
        kv_cache,
        *batch.of_requests,
        *(jnp.zeros(0, jnp.float32) if x is None else x.astype(jnp.float32) for x in (sinks, bias)),
        aliases={3: 0},
        block_size=np.int64(block_size),
        window=np.int64(span.sliding_window or UNLIMITED),
        chunk_size=np.int64(span.attention_chunk_size or UNLIMITED),
        lookahead=np.int64(UNLIMITED if span.lookahead is None else span.lookahead),
        scale=np.float32(scale),
        soft_cap=np.float32(soft_cap or 0),
    )
    return kv_cache, out[..., :given_dim].astype(q.dtype)
