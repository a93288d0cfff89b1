"""Latent attention on NVIDIA GPUs (Ampere and later), by the Triton kernels of ragged paged attention.

All heads share one entry per token. The kernels compute it as attention with one kv head whose values are the first
part of its keys, read once for both.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxis.kernels.batch import Batch
from jaxis.kernels.ragged_paged_attention.gpu import MAX_INT8_ELEMENTS, product_type, read_scale
from jaxis.kernels.ragged_paged_attention.gpu_decode import attend_decodes
from jaxis.kernels.ragged_paged_attention.gpu_prefill import attend_prefills
from jaxis.kernels.ragged_paged_attention.gpu_rows import read_rows
from jaxis.kernels.ragged_paged_attention.gpu_tile import Chunk, PagedAttention, TileSize
from jaxis.kernels.ragged_paged_attention.layout import SCALE_BYTES

MAX_VALUE_DIM = 512


def supports(q: jax.Array, kv_cache: jax.Array, value_dim: int) -> bool:
    fits = kv_cache.dtype != jnp.int8 or kv_cache.size < MAX_INT8_ELEMENTS
    return fits and value_dim <= MAX_VALUE_DIM and q.shape[-1] - value_dim <= value_dim


def latent_attention(
    q: jax.Array,
    kv_cache: jax.Array,
    batch: Batch,
    *,
    value_dim: int,
    scale: float,
    sinks: jax.Array | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Attends with each query to its request's cached entries; padding rows are 0.

    `interpret` runs the kernels without a GPU, for tests.
    """
    num_tokens, num_heads, head_dim = q.shape
    parts = [(0, value_dim), (value_dim, head_dim - value_dim)]
    attention = PagedAttention(
        num_kv_heads=1,
        group_size=num_heads,
        query_parts=tuple((offset, size) for offset, size in parts if size),
        value_dim=value_dim,
        block_size=kv_cache.shape[1],
        dtype=product_type(q.dtype, kv_cache.dtype),
        read_chunk=functools.partial(read_chunk, value_dim=value_dim, head_dim=head_dim),
        scale=scale,
    )
    out = jnp.zeros((num_tokens, num_heads, value_dim), q.dtype)
    if num_tokens > 1:
        out = attend_prefills(attention, q, kv_cache, batch, sinks, out, prefill_tile(attention), interpret=interpret)
    return attend_decodes(attention, q, kv_cache, batch, sinks, out, decode_tile(attention), interpret=interpret)


def prefill_tile(attention: PagedAttention) -> TileSize:
    """Returns sizes that spill no register on H100."""
    if attention.dtype == jnp.float32:  # no tensor cores
        return TileSize(rows=16, tokens=16, num_warps=8, num_stages=1)
    return TileSize(rows=32, tokens=32, num_warps=8, num_stages=2)


def decode_tile(attention: PagedAttention) -> TileSize:
    """Returns sizes that spill no register on H100; the rows are one query's heads."""
    if attention.dtype == jnp.float32:
        return TileSize(rows=16, tokens=16, num_warps=8, num_stages=1)
    return TileSize(rows=16, tokens=32, num_warps=4, num_stages=2)


def read_chunk(
    cache_ref: Any,
    blocks: jax.Array,
    offsets: jax.Array,
    kv_head: jax.Array,
    exists: jax.Array,
    dtype: DTypeLike,
    *,
    value_dim: int,
    head_dim: int,
) -> Chunk:
    entry = (blocks, offsets, kv_head)
    latents = read_rows(cache_ref, entry, (0, value_dim), exists).astype(dtype)
    rope_dim = head_dim - value_dim
    keys = (latents,)
    if rope_dim:
        keys = (latents, read_rows(cache_ref, entry, (value_dim, rope_dim), exists).astype(dtype))
    if cache_ref.dtype != jnp.int8:
        return Chunk(keys, (None,) * len(keys), latents, None)
    scales = tuple(read_scale(cache_ref, entry, head_dim + i * SCALE_BYTES, exists) for i in range(len(keys)))
    return Chunk(keys, scales, latents, scales[0])
