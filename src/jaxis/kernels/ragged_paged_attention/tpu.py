"""Ragged paged attention on TPU: Pallas kernels over a cache with a layout of its own (`tpu_layout.py`).

One kernel writes the entries of prefills into their pages (`tpu_write.py`). Another one attends (`tpu_kernel.py`): once
for the decodes, whose entries it also writes, and once for the prefills. They compile for TPUs and run in Pallas's
interpreter, but have not run on a TPU yet.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxis.config.attention_span import FULL_CONTEXT, AttentionSpan
from jaxis.kernels.ragged_paged_attention.layout import request_of_token
from jaxis.kernels.ragged_paged_attention.tpu_append import NewEntries
from jaxis.kernels.ragged_paged_attention.tpu_kernel import Tiling, attend_tiles
from jaxis.kernels.ragged_paged_attention.tpu_layout import LANES, PageLayout
from jaxis.kernels.ragged_paged_attention.tpu_tile import Scoring
from jaxis.kernels.ragged_paged_attention.tpu_work_items import work_items
from jaxis.kernels.ragged_paged_attention.tpu_write import write_pages

# Tokens of context per product, fewer if they fill CHUNK_BYTES. They are the same for decodes and prefills, which thus
# split a request's context at the same places. STREAM_BYTES are the bytes of context in flight.
MIN_CHUNK_TOKENS = 128
MAX_CHUNK_TOKENS = 512
CHUNK_BYTES = 512 << 10
STREAM_BYTES = 4 << 20
MAX_BUFFERS = 8
# Limits of a tile: rows of one kv head, rows of all kv heads, and scores of rows of one kv head with a chunk.
TILE_ROWS = 256
TILE_ROWS_OF_ALL_HEADS = 2048
TILE_SCORES = 1 << 16

# The number of items, and the request and the tile of each.
ItemLists = tuple[jax.Array, jax.Array, jax.Array]


def ragged_paged_attention(
    q: jax.Array,
    k: jax.Array | None,
    v: jax.Array | None,
    kv_cache: jax.Array,
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
    head_dim = q.shape[-1]
    page = PageLayout.of_heads(1, head_dim, kv_cache.dtype).of_cache(kv_cache.shape)
    padded = jnp.pad(q, ((0, 0), (0, 0), (0, len(page.key_scales) * LANES - head_dim)))
    step = FlatBatch(seq_lens, block_tables, query_start_loc, request_distribution)
    parts = None if k is None or v is None else (k, v)
    kv_cache, out = write_and_attend(padded, parts, kv_cache, step, sinks, page, Scoring(scale, span, soft_cap))
    return kv_cache, out[..., page.value_lane : page.value_lane + head_dim]


class FlatBatch(NamedTuple):
    """Flat batch of a step: the rows and the contexts of its requests.

    seq_lens are i32 [R], block_tables [R, max_blocks], query_start_loc [R + 1] and request_distribution [3].
    """

    seq_lens: jax.Array
    block_tables: jax.Array
    query_start_loc: jax.Array
    request_distribution: jax.Array


def write_and_attend(
    q: jax.Array,
    parts: tuple[jax.Array, jax.Array] | None,
    kv_cache: jax.Array,
    step: FlatBatch,
    sinks: jax.Array | None,
    page: PageLayout,
    scoring: Scoring,
) -> tuple[jax.Array, jax.Array]:
    """Writes entries into the cache, then attends with each query to its request's entries up to its own position.

    q is [T, H, W], padded as the key planes are. `parts` are two parts of the entries (keys and values, or latents and
    rope keys), each [T, K, d]; None if the cache, [num_blocks, K, N, 128], has them already. Sinks are [H] or None.
    Returns the cache, and [T, H, value planes * 128] in q's type; padding rows are 0.
    """
    num_tokens, num_heads, _ = q.shape
    num_kv_heads, original_type = kv_cache.shape[1], q.dtype
    group_size = num_heads // num_kv_heads
    chunk_pages, num_buffers = _chunks(kv_cache, page)
    num_decodes, num_requests = step.request_distribution[0], step.request_distribution[2]
    request, valid = request_of_token(step.query_start_loc, num_requests, num_tokens)

    def attend(
        rows: jax.Array, kv_cache: jax.Array, items: ItemLists, tile_queries: int, entries: NewEntries | None
    ) -> tuple[jax.Array, jax.Array]:
        tiles = _to_tiles(rows, num_kv_heads, tile_queries)
        kv_cache, out = attend_tiles(
            tiles,
            kv_cache,
            *step[:3],
            items,
            None if sinks is None else _tile_sinks(sinks, num_kv_heads, tiles.shape[2]),
            entries,
            page=page,
            tiling=Tiling(tile_queries, chunk_pages, num_buffers),
            scoring=scoring,
            group_size=group_size,
        )
        return kv_cache, _from_tiles(out, group_size, tile_queries)[: rows.shape[0]]

    # A TPU has no products of float16, and a float32 cache asks for products of float32.
    if q.dtype != jnp.bfloat16 or kv_cache.dtype == jnp.float32:
        q = q.astype(jnp.float32)
    index = jnp.arange(min(num_tokens, step.seq_lens.shape[0]), dtype=jnp.int32)
    if num_tokens == 1:
        # A step of one token is a decode, or a prefill of one token, which is the same sum.
        index, num_decodes = request, valid[0].astype(jnp.int32)
    last_page = jnp.maximum(step.seq_lens[index] - 1, 0) // page.block_size
    entries = None
    if parts is not None:
        entries = NewEntries.of(
            (parts[0][: index.shape[0]], parts[1][: index.shape[0]]),
            step.block_tables[index, last_page],
            page,
            kv_cache.dtype,
        )
    items = (num_decodes, index, jnp.arange(index.shape[0], dtype=jnp.int32))
    if parts is not None and num_tokens > 1:
        kv_cache = write_pages(kv_cache, parts, page, *step[:3], (num_decodes, num_requests))
    kv_cache, out = attend(q[: index.shape[0]], kv_cache, items, 1, entries)
    if num_tokens > 1:
        tile_rows = _tile_rows(num_kv_heads, chunk_pages * page.block_size)
        tile_queries = min(num_tokens, _power_of_two(tile_rows // group_size))
        items = _prefill_items(step.query_start_loc, num_decodes, num_requests, num_tokens, tile_queries)
        _, rest = attend(q, kv_cache, items, tile_queries, None)
        decodes = jnp.where((index < num_decodes)[:, None, None], out, rest[: index.shape[0]])
        out = jnp.concatenate([decodes, rest[index.shape[0] :]])
    return kv_cache, jnp.where(valid[:, None, None], out, 0).astype(original_type)


def _prefill_items(
    query_start_loc: jax.Array, num_decodes: jax.Array, num_requests: jax.Array, num_tokens: int, tile_queries: int
) -> ItemLists:
    """Returns an item for each tile of rows and each request, from `num_decodes` on, that has rows in the tile."""
    begin, end = query_start_loc[:-1], query_start_loc[1:]
    index = jnp.arange(begin.shape[0])
    is_prefill = (index >= num_decodes) & (index < num_requests) & (end > begin)
    first_tile = begin // tile_queries
    counts = jnp.where(is_prefill, (end - 1) // tile_queries - first_tile + 1, 0)
    # Each item but a tile's first begins another request.
    num_tiles = -(-num_tokens // tile_queries)
    items = work_items(counts, min(num_tokens, num_tiles + begin.shape[0]))
    tiles = jnp.minimum(first_tile[items.request] + items.nth, num_tiles - 1)
    return items.count, items.request, jnp.maximum(tiles, 0)


def _chunks(kv_cache: jax.Array, page: PageLayout) -> tuple[int, int]:
    """Returns pages per chunk, and chunks in VMEM or in flight. They follow from the cache's shape alone."""
    page_bytes = math.prod(kv_cache.shape[1:]) * kv_cache.dtype.itemsize
    tokens = min(MAX_CHUNK_TOKENS, max(MIN_CHUNK_TOKENS, _power_of_two(CHUNK_BYTES * page.block_size // page_bytes)))
    chunk_pages = max(1, tokens // page.block_size)
    return chunk_pages, min(MAX_BUFFERS, max(2, STREAM_BYTES // (chunk_pages * page_bytes)))


def _tile_rows(num_kv_heads: int, chunk_tokens: int) -> int:
    return max(16, min(TILE_ROWS, TILE_ROWS_OF_ALL_HEADS // num_kv_heads, TILE_SCORES // chunk_tokens))


def _power_of_two(number: int) -> int:
    return 1 << (max(1, number).bit_length() - 1)


def _to_tiles(q: jax.Array, num_kv_heads: int, tile_queries: int) -> jax.Array:
    """Tiles [T, H, W] as [tiles, K, M, W]: row m is token m // G and query head m % G of the kv head; M is padded."""
    num_tokens, num_heads, width = q.shape
    q = jnp.pad(q, ((0, -num_tokens % tile_queries), (0, 0), (0, 0)))
    q = q.reshape(-1, tile_queries, num_kv_heads, num_heads // num_kv_heads, width).transpose(0, 2, 1, 3, 4)
    q = q.reshape(q.shape[0], num_kv_heads, -1, width)
    # Whole registers: 8 rows of 32 bits, 16 of bfloat16.
    return jnp.pad(q, ((0, 0), (0, 0), (0, -q.shape[2] % (32 // q.dtype.itemsize)), (0, 0)))


def _from_tiles(tiles: jax.Array, group_size: int, tile_queries: int) -> jax.Array:
    num_tiles, num_kv_heads, _, width = tiles.shape
    rows = tiles[:, :, : tile_queries * group_size]
    rows = rows.reshape(num_tiles, num_kv_heads, tile_queries, group_size, width).transpose(0, 2, 1, 3, 4)
    return rows.reshape(num_tiles * tile_queries, num_kv_heads * group_size, width)


def _tile_sinks(sinks: jax.Array, num_kv_heads: int, num_rows: int) -> jax.Array:
    of_heads = sinks.astype(jnp.float32).reshape(num_kv_heads, -1)
    repeats = -(-num_rows // of_heads.shape[1])
    return jnp.tile(of_heads, (1, repeats))[:, :num_rows, None]
