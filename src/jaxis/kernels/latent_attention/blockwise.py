"""Latent attention in plain JAX, without work on padding, by the two loops of `ragged_paged_attention.blockwise`."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from jaxis.kernels.batch import Batch
from jaxis.kernels.latent_attention.layout import ContextPart, decode
from jaxis.kernels.ragged_paged_attention.context_chunks import OnlineSoftmax, blocks_of_chunk, product, whole_chunks

# Context tokens read at a time, and queries per prefill tile, each with all its heads.
CHUNK_TOKENS = 128
TILE_QUERIES = 16


def latent_attention(
    q: jax.Array,
    kv_cache: jax.Array,
    batch: Batch,
    *,
    value_dim: int,
    scale: float,
    part: ContextPart | None = None,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """Attends with each query to its request's cached entries up to its own position.

    With a `part`, the cache holds only these tokens of each block, and the result is float32 [T, H, value_dim + 2]: the
    sum of weighted values, the largest score, and the sum of weights relative to it.
    """
    attention = _Attention(q, kv_cache, batch.block_tables, value_dim, scale, part, sinks)
    if q.shape[0] == 1:
        # A step of one token is a decode, or a prefill of one token, which is the same sum.
        request, valid = batch.request_of_token()
        attention = dataclasses.replace(attention, block_tables=batch.block_tables[request])
        return attention.decode(batch.seq_lens[request], valid[0].astype(jnp.int32))
    return attention.prefill(attention.decode(batch.seq_lens, batch.request_distribution[0]), batch)


@dataclass(frozen=True)
class _Attention:
    q: jax.Array
    kv_cache: jax.Array
    block_tables: jax.Array
    value_dim: int
    scale: float
    part: ContextPart | None
    sinks: jax.Array | None

    def decode(self, seq_lens: jax.Array, num_decodes: jax.Array) -> jax.Array:
        """Returns [T, H, results], 0 but in the first `num_decodes` rows; request r's only query is row r."""
        num_tokens, num_heads, _ = self.q.shape
        num_rows = min(num_tokens, self.block_tables.shape[0])
        positions = jnp.where(jnp.arange(num_rows) < num_decodes, seq_lens[:num_rows] - 1, -1)
        rows = self._attend(self.q[:num_rows], self.block_tables[:num_rows], positions[:, None])
        return jnp.zeros((num_tokens, num_heads, rows.shape[-1]), rows.dtype).at[:num_rows].set(rows)

    def prefill(self, out: jax.Array, batch: Batch) -> jax.Array:
        """Fills the rows of `out` [T, H, results] that belong to requests which are no decodes."""
        seq_lens, query_start_loc = batch.seq_lens, batch.query_start_loc
        num_tokens, tile = self.q.shape[0], min(TILE_QUERIES, self.q.shape[0])
        index = jnp.arange(seq_lens.shape[0])
        query_lens = jnp.where(index >= batch.request_distribution[0], batch.query_lens, 0)
        num_tiles = (query_lens + tile - 1) // tile
        tile_ends = jnp.cumsum(num_tiles)
        # Padded, because a tile that starts near the end of the batch must still be sliced whole.
        q = jnp.pad(self.q, ((0, tile), (0, 0), (0, 0)))

        def one_tile(i: jax.Array, out: jax.Array) -> jax.Array:
            request = jnp.searchsorted(tile_ends, i, side="right")
            offset = (i - (tile_ends[request] - num_tiles[request])) * tile + jnp.arange(tile)
            first_row = query_start_loc[request] + offset[0]
            in_request = offset < query_lens[request]
            positions = jnp.where(in_request, seq_lens[request] - query_lens[request] + offset, -1)
            # All heads of all the tile's queries in one axis, like the heads of one decode.
            queries = lax.dynamic_slice_in_dim(q, first_row, tile).reshape(1, -1, q.shape[-1])
            positions = jnp.repeat(positions, q.shape[1])[None]
            rows = self._attend(queries, self.block_tables[request][None], positions).reshape(tile, *out.shape[1:])
            old_rows = lax.dynamic_slice_in_dim(out, first_row, tile)
            rows = jnp.where(in_request[:, None, None], rows, old_rows)
            return lax.dynamic_update_slice_in_dim(out, rows, first_row, axis=0)

        padded = jnp.pad(out, ((0, tile), (0, 0), (0, 0)))
        return lax.fori_loop(0, tile_ends[-1], one_tile, padded)[:num_tokens]

    def _attend(self, queries: jax.Array, block_tables: jax.Array, positions: jax.Array) -> jax.Array:
        """Attends for N requests with M queries each (heads count as queries), [N, M, D]; sums are 0 for padding.

        Block tables are i32 [N, max_blocks], positions i32 [N, M or 1], -1 for padding. Returns [N, M, results].
        """
        num, num_queries, head_dim = queries.shape
        block_size = self.kv_cache.shape[1]
        chunk_tokens, block_tables = whole_chunks(block_tables, block_size, CHUNK_TOKENS)
        last_positions = jnp.max(positions, axis=1, keepdims=True)
        part = self.part or ContextPart(block_size, block_size, jnp.int32(0))

        def one_chunk(chunk: jax.Array, carry: OnlineSoftmax) -> OnlineSoftmax:
            context_positions = part.position_of(chunk * chunk_tokens + jnp.arange(chunk_tokens))
            # Gather before reshaping: XLA would copy a reshaped cache that this step has written to.
            cached = self.kv_cache[blocks_of_chunk(block_tables, chunk, chunk_tokens // block_size)]
            context = decode(cached, self.value_dim, head_dim).reshape(num, chunk_tokens, head_dim)
            # Blocks past a request's own hold other requests' entries, or garbage: a NaN there must not spread.
            context = jnp.where((context_positions <= last_positions)[..., None], context, 0)
            scores = product("nmd,nsd->nms", queries, context) * self.scale
            scores = jnp.where(context_positions <= positions[..., None], scores, -jnp.inf)
            carry, weights = carry.add_scores(scores)
            values = context[..., : self.value_dim]
            return carry.add_values(product("nms,nsd->nmd", weights.astype(values.dtype), values))

        empty = OnlineSoftmax.empty((num, num_queries), self.value_dim)
        num_chunks = jnp.max(last_positions) // (chunk_tokens // part.size * part.block_size) + 1
        result = lax.fori_loop(0, num_chunks, one_chunk, empty)
        if self.part is None:
            sinks = None if self.sinks is None else jnp.tile(self.sinks, num_queries // len(self.sinks))
            return result.output(sinks).astype(queries.dtype)
        return jnp.concatenate([result.values, result.peak[..., None], result.total[..., None]], axis=-1)
