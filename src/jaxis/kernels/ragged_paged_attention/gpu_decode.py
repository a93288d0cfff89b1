"""Decodes on GPU: the context of a request with one query is split over several programs, whose sums are combined.

The split of a context depends on its request alone, and sums are combined in order: bits do not depend on the batch.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from jaxis.kernels.batch import Batch
from jaxis.kernels.ragged_paged_attention.gpu_rows import load, padded_size, read_rows, store, write_rows
from jaxis.kernels.ragged_paged_attention.gpu_tile import (
    LOG2_E,
    MASKED,
    HeadTile,
    PagedAttention,
    SoftmaxSums,
    TileSize,
    attend,
    empty_sums,
)

# The fewest tokens that a program attends to: fewer are not worth the cost of combining.
MIN_PARTITION_TOKENS = 128
# The approximate number of a request's programs. One request alone should keep a GPU of some hundred multiprocessors
# busy; many requests should not start programs without work, nor need much memory for their sums.
PROGRAMS_PER_REQUEST = 128
MIN_PARTITIONS, MAX_PARTITIONS = 8, 32
# Partitions whose sums are added at a time.
COMBINED_PARTITIONS = 8


def max_partitions(num_head_tiles: int) -> int:
    """Returns P, the most partitions of a request's context, a power of two."""
    return min(MAX_PARTITIONS, max(MIN_PARTITIONS, PROGRAMS_PER_REQUEST // pl.next_power_of_2(num_head_tiles)))


class Partitions:
    """Partitions of the visible context of a request's query.

    Attributes:
      tokens: Tokens of each partition but the last, a multiple of a chunk.
      begin: Begin of the first partition, a multiple of a chunk.
      first: The first token that the query sees, in the first chunk.
      end: End of the last partition: the request's length.
    """

    def __init__(self, attention: PagedAttention, length: jax.Array, chunk_tokens: int, limit: int) -> None:
        self.first = attention.span.first_visible(length - 1)
        self.begin = self.first // chunk_tokens * chunk_tokens
        self.end = length
        chunks = pl.cdiv(length - self.begin, limit * chunk_tokens)
        self.tokens = jnp.maximum(MIN_PARTITION_TOKENS, chunks * chunk_tokens)

    @property
    def count(self) -> jax.Array:
        return pl.cdiv(self.end - self.begin, self.tokens)


def attend_decodes(
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
    """Attends with the only query of each request that has one token; returns `out`, or q, with these rows filled.

    q is [T, H, D]; `attention.read_chunk` reads the cache; sinks are float [H], or None. `out`, [T, H, value size], is
    updated in place; None puts results in the place of queries. `interpret` runs without a GPU, for tests.
    """
    num_requests, max_blocks = batch.block_tables.shape
    num_heads = q.shape[1]
    limit = max_partitions(attention.num_head_tiles(tile.rows))
    context = max_blocks * attention.block_size
    if attention.span.reach is not None:
        context = min(context, attention.span.reach + tile.tokens)
    # Fewer if no request can be long enough for all. That does not change a request's split.
    partitions = min(limit, pl.cdiv(context, MIN_PARTITION_TOKENS))
    sums = SoftmaxSums(
        jax.ShapeDtypeStruct((num_requests, num_heads, partitions), jnp.float32),
        jax.ShapeDtypeStruct((num_requests, num_heads, partitions), jnp.float32),
        jax.ShapeDtypeStruct((num_requests, num_heads, partitions, attention.value_dim), jnp.float32),
    )
    sums = pl.pallas_call(
        functools.partial(_partition_kernel, attention=attention, tile=tile, limit=limit),
        out_shape=sums,
        grid=(num_requests, attention.num_head_tiles(tile.rows), partitions),
        compiler_params=tile.compiler_params,
        interpret=interpret,
        name="paged_decode",
    )(q, kv_cache, batch)
    target = q if out is None else out
    return pl.pallas_call(
        functools.partial(_combine_kernel, attention=attention, chunk_tokens=tile.tokens, limit=limit),
        out_shape=jax.ShapeDtypeStruct(target.shape, target.dtype),
        grid=(num_requests, num_heads),
        input_output_aliases={0: 0},
        compiler_params=plgpu.CompilerParams(num_warps=max(1, attention.value_dim // 128), num_stages=1),
        interpret=interpret,
        name="paged_decode_combine",
    )(target, sums, batch, sinks)


def _partition_kernel(
    q_ref: Any,
    cache_ref: Any,
    batch: Batch,
    *sums_refs: Any,
    attention: PagedAttention,
    tile: TileSize,
    limit: int,
) -> None:
    sums = SoftmaxSums(*sums_refs)
    request, head_tile, partition = (pl.program_id(axis) for axis in range(3))
    partitions = Partitions(attention, batch.seq_lens[request], tile.tokens, limit)

    @pl.when((batch.query_len(request) == 1) & (partition < partitions.count))
    def _() -> None:
        rows = HeadTile.of(attention, tile.rows, tile.rows, head_tile)
        queries = tuple(
            read_rows(q_ref, (batch.query_start_loc[request], rows.head), part, rows.exists).astype(attention.dtype)
            for part in attention.query_parts
        )
        begin = partitions.begin + partition * partitions.tokens
        end = jnp.minimum(begin + partitions.tokens, partitions.end)
        positions = jnp.full((tile.rows,), 0, jnp.int32) + (partitions.end - 1)
        context = (begin, end, partitions.first)
        result = attend(
            attention,
            queries,
            positions,
            cache_ref,
            batch,
            request,
            rows.kv_head,
            context,
            tile.tokens,
            empty_sums(tile.rows, attention.value_dim),
        )
        store(sums.peak, (request, rows.head, partition), result.peak, rows.exists)
        store(sums.total, (request, rows.head, partition), result.total, rows.exists)
        write_rows(sums.values, (request, rows.head, partition), attention.value_dim, rows.exists, result.values)


def _combine_kernel(
    target_ref: Any,
    sums: SoftmaxSums,
    batch: Batch,
    sinks_ref: Any | None,
    out_ref: Any,
    *,
    attention: PagedAttention,
    chunk_tokens: int,
    limit: int,
) -> None:
    del target_ref  # out_ref's memory
    request, head = pl.program_id(0), pl.program_id(1)

    @pl.when(batch.query_len(request) == 1)
    def _() -> None:
        count = Partitions(attention, batch.seq_lens[request], chunk_tokens, limit).count
        partition = jnp.arange(limit, dtype=jnp.int32)
        own = (request, head, jnp.minimum(partition, count - 1))
        peaks = jnp.where(partition < count, sums.peak[own], MASKED)
        peak = jnp.max(peaks)
        total = jnp.float32(0)
        if sinks_ref is not None:
            sink = sinks_ref[head].astype(jnp.float32) * LOG2_E
            peak = jnp.maximum(peak, sink)
            total = jnp.exp2(sink - peak)
        total += jnp.sum(jnp.where(partition < count, sums.total[own] * jnp.exp2(peaks - peak), 0.0))

        def add(index: jax.Array, values: jax.Array) -> jax.Array:
            partition = index * COMBINED_PARTITIONS + jnp.arange(COMBINED_PARTITIONS, dtype=jnp.int32)
            exists = partition < count
            peaks = load(sums.peak, (request, head, partition), exists, MASKED)
            rows = read_rows(sums.values, (request, head, partition), (0, attention.value_dim), exists)
            return values + jnp.sum(rows * jnp.exp2(peaks - peak)[:, None], axis=0)

        zeros = jnp.zeros((padded_size(attention.value_dim),), jnp.float32)
        values = lax.fori_loop(0, pl.cdiv(count, COMBINED_PARTITIONS), add, zeros)
        column = jnp.arange(values.shape[0], dtype=jnp.int32)
        row = (batch.query_start_loc[request], head, column)
        store(out_ref, row, values / total, column < attention.value_dim)
