"""Prefills on GPU: each program attends with a tile of consecutive queries of one request to all tokens they see."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from jaxis.kernels.batch import Batch
from jaxis.kernels.ragged_paged_attention.gpu_rows import read_rows, write_rows
from jaxis.kernels.ragged_paged_attention.gpu_tile import (
    LOG2_E,
    HeadTile,
    PagedAttention,
    SoftmaxSums,
    TileSize,
    attend,
    empty_sums,
)

NO_TILE = -1


def attend_prefills(
    attention: PagedAttention,
    q: jax.Array,
    kv_cache: jax.Array,
    batch: Batch,
    sinks: jax.Array | None,
    out: jax.Array | None,
    tile: TileSize,
    *,
    interpret: bool,
) -> jax.Array:
    """Attends with each query of the requests that have two tokens or more in this step.

    Takes the arguments of `gpu_decode.attend_decodes`, and returns `out`, or q, with these requests' rows filled.
    """
    num_tokens = q.shape[0]
    heads = min(attention.group_size, tile.rows)
    tiles = prefill_tiles(batch, num_tokens, tile.rows // heads)
    target = q if out is None else out
    return pl.pallas_call(
        functools.partial(_prefill_kernel, attention=attention, tile=tile, heads=heads),
        out_shape=jax.ShapeDtypeStruct(target.shape, target.dtype),
        grid=(tiles.shape[1], attention.num_head_tiles(tile.rows)),
        input_output_aliases={0: 0},
        compiler_params=tile.compiler_params,
        interpret=interpret,
        name="paged_prefill",
    )(target, None if out is None else q, kv_cache, batch, tiles, sinks)


def prefill_tiles(batch: Batch, num_tokens: int, tile_queries: int) -> jax.Array:
    """Returns the tiles, of at most `tile_queries` queries, of all requests with two tokens or more: i32 [2, tiles].

    These are each tile's request, -1 for none, and its first query, counted from the request's first in this step.
    There are as many as `num_tokens` tokens can need.
    """
    max_requests = batch.seq_lens.shape[0]
    # A request needs its tokens' share of full tiles, and at most one that is not full.
    num_tiles = num_tokens // tile_queries + min(max_requests, num_tokens // 2)
    queries = batch.query_lens
    count = jnp.where(queries > 1, (queries + tile_queries - 1) // tile_queries, 0)
    ends = jnp.cumsum(count, dtype=jnp.int32)
    tile = jnp.arange(num_tiles, dtype=jnp.int32)
    # Not searchsorted, which is a loop; this is one small fusion.
    request = jnp.sum(ends <= tile[:, None], axis=1, dtype=jnp.int32)
    first = (tile - (ends - count)[jnp.minimum(request, max_requests - 1)]) * tile_queries
    return jnp.stack([jnp.where(tile < ends[-1], request, NO_TILE), first])


def _prefill_kernel(
    target_ref: Any,
    q_ref: Any | None,
    cache_ref: Any,
    batch: Batch,
    tiles_ref: Any,
    sinks_ref: Any | None,
    out_ref: Any,
    *,
    attention: PagedAttention,
    tile: TileSize,
    heads: int,
) -> None:
    tile_index, head_tile = pl.program_id(0), pl.program_id(1)
    request, first_query = tiles_ref[0, tile_index], tiles_ref[1, tile_index]

    @pl.when(request != NO_TILE)
    def _() -> None:
        rows = HeadTile.of(attention, tile.rows, heads, head_tile)
        query = first_query + rows.query
        num_queries = batch.query_len(request)
        exists = rows.exists & (query < num_queries)
        row = batch.query_start_loc[request] + query
        history = batch.seq_lens[request] - num_queries
        positions = history + query
        queries = tuple(
            read_rows(target_ref if q_ref is None else q_ref, (row, rows.head), part, exists).astype(attention.dtype)
            for part in attention.query_parts
        )
        sums = empty_sums(tile.rows, attention.value_dim)
        if sinks_ref is not None:
            sinks = sinks_ref[jnp.where(rows.exists, rows.head, 0)].astype(jnp.float32) * LOG2_E
            sums = SoftmaxSums(sinks, jnp.ones_like(sinks), sums.values)
        end = history + jnp.minimum(first_query + tile.rows // heads, num_queries)
        first = attention.span.first_visible(history + first_query)
        context = (first // tile.tokens * tile.tokens, end, first)
        sums = attend(
            attention, queries, positions, cache_ref, batch, request, rows.kv_head, context, tile.tokens, sums
        )
        write_rows(out_ref, (row, rows.head), attention.value_dim, exists, sums.values / sums.total[:, None])
