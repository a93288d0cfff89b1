"""Ragged paged attention on NVIDIA GPUs (Ampere and later), by Triton kernels.

Requests with one query in the step are decodes, whose context is split over programs (`gpu_decode.py`). All other
requests are prefills, whose queries are computed in tiles (`gpu_prefill.py`). Requests may stand in the batch in any
order. Results take the place of the queries, and the cache is read in place.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from jaxis.config.attention_span import FULL_CONTEXT, AttentionSpan
from jaxis.kernels.batch import Batch
from jaxis.kernels.ragged_paged_attention.gpu_decode import attend_decodes
from jaxis.kernels.ragged_paged_attention.gpu_prefill import attend_prefills
from jaxis.kernels.ragged_paged_attention.gpu_rows import MIN_DOT_SIZE, read_rows
from jaxis.kernels.ragged_paged_attention.gpu_tile import Chunk, PagedAttention, TileSize
from jaxis.kernels.ragged_paged_attention.layout import SCALE_BYTES

MAX_HEAD_DIM = 256
MAX_INT8_ELEMENTS = 1 << 31


def supports(q: jax.Array, kv_cache: jax.Array) -> bool:
    # Pallas counts offsets into up to 4 GiB in 32 bits, and Triton takes them as signed.
    return q.shape[-1] <= MAX_HEAD_DIM and (kv_cache.dtype != jnp.int8 or kv_cache.size < MAX_INT8_ELEMENTS)


def ragged_paged_attention(
    q: jax.Array,
    kv_cache: jax.Array,
    batch: Batch,
    *,
    scale: float,
    span: AttentionSpan = FULL_CONTEXT,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Attends with each query to its request's cached tokens up to its own position; padding rows are those of q.

    `interpret` runs the kernels without a GPU, for tests.
    """
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads = kv_cache.shape[2] // 2
    attention = PagedAttention(
        num_kv_heads=num_kv_heads,
        group_size=num_heads // num_kv_heads,
        query_parts=((0, head_dim),),
        value_dim=head_dim,
        block_size=kv_cache.shape[1],
        dtype=product_type(q.dtype, kv_cache.dtype),
        read_chunk=read_chunk,
        scale=scale,
        span=span,
        soft_cap=soft_cap,
    )
    if num_tokens > 1:
        tile = prefill_tile(attention, kv_cache.dtype)
        q = attend_prefills(attention, q, kv_cache, batch, sinks, None, tile, interpret=interpret)
    return attend_decodes(attention, q, kv_cache, batch, sinks, None, decode_tile(attention), interpret=interpret)


def product_type(q: DTypeLike, cache: DTypeLike) -> DTypeLike:
    """Returns the type of products: q's for an int8 cache, since 16-bit floats hold every int8 exactly."""
    return q if cache == jnp.int8 else jnp.promote_types(q, cache)


def prefill_tile(attention: PagedAttention, cache_dtype: DTypeLike) -> TileSize:
    """Returns sizes that spill no registers on A100 and H100."""
    is_wide = attention.value_dim > 128
    if attention.dtype == jnp.float32:
        return _float32_tile(attention, num_warps=16 if is_wide else 8)
    if is_wide:
        return TileSize(rows=64, tokens=32, num_warps=8, num_stages=2)
    # Dequantizing an int8 chunk, and the begin of a span, take registers of their own.
    needs_more = cache_dtype == jnp.int8 or attention.span != FULL_CONTEXT
    return TileSize(rows=64, tokens=64, num_warps=8 if needs_more else 4, num_stages=2)


def decode_tile(attention: PagedAttention) -> TileSize:
    """Returns sizes that spill no registers on A100 and H100; the rows are one query's heads."""
    if attention.dtype == jnp.float32:
        return _float32_tile(attention, num_warps=8)
    rows = min(64, max(MIN_DOT_SIZE, 1 << (attention.group_size - 1).bit_length()))
    return TileSize(rows=rows, tokens=64 if attention.value_dim <= 128 else 32, num_warps=4, num_stages=2)


def _float32_tile(attention: PagedAttention, num_warps: int) -> TileSize:
    """Returns small sizes: without tensor cores, products keep many more numbers in registers."""
    return TileSize(rows=16, tokens=32 if attention.value_dim <= 128 else 16, num_warps=num_warps, num_stages=1)


def read_chunk(
    cache_ref: Any, blocks: jax.Array, offsets: jax.Array, kv_head: jax.Array, exists: jax.Array, dtype: DTypeLike
) -> Chunk:
    is_int8 = cache_ref.dtype == jnp.int8
    head_dim = cache_ref.shape[-1] - (SCALE_BYTES if is_int8 else 0)
    key, value = (blocks, offsets, 2 * kv_head), (blocks, offsets, 2 * kv_head + 1)
    k, v = (read_rows(cache_ref, entry, (0, head_dim), exists).astype(dtype) for entry in (key, value))
    if not is_int8:
        return Chunk((k,), (None,), v, None)
    k_scale, v_scale = (read_scale(cache_ref, entry, head_dim, exists) for entry in (key, value))
    return Chunk((k,), (k_scale,), v, v_scale)


def read_scale(cache_ref: Any, entry: tuple[Any, ...], offset: int, exists: jax.Array) -> jax.Array:
    """Reads the float32 at this byte offset of N entries of an int8 cache: [N], 0 where not `exists`."""
    scale_bytes = read_rows(cache_ref, entry, (offset, SCALE_BYTES), exists, SCALE_BYTES).astype(jnp.int32) & 0xFF
    shift = 8 * jnp.arange(SCALE_BYTES, dtype=jnp.int32)
    return lax.bitcast_convert_type(jnp.sum(scale_bytes << shift[None, :], axis=1), jnp.float32)
