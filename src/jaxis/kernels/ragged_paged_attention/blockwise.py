"""Ragged paged attention in plain JAX that does only the work there is.

Context is read in chunks of whole blocks with an online softmax (arXiv:2205.14135), so memory does not grow with the
context and one compiled program serves every length: the loops' trip counts come from the data. Decodes (one query a
request) go through one loop, all requests side by side; prefill goes tile by tile of consecutive queries of one
request. Either loop does nothing when a step has none of its kind.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jaxis.kernels.ragged_paged_attention.layout import request_of_token, split_kv

# Context tokens read at once, and queries of a prefill tile: large enough to make products of them, small enough to
# stay in cache.
CHUNK_TOKENS = 256
TILE_QUERIES = 64


def ragged_paged_attention(
    q: jax.Array,
    kv_cache: jax.Array,
    seq_lens: jax.Array,
    block_tables: jax.Array,
    query_start_loc: jax.Array,
    request_distribution: jax.Array,
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
) -> jax.Array:
    """Attention of each query to its own request's cached tokens up to itself.

    Args, result: As for `jaxis.kernels.ragged_paged_attention.ragged_paged_attention`.
    """
    block_size = kv_cache.shape[1]
    blocks_per_chunk = max(1, min(CHUNK_TOKENS // block_size, block_tables.shape[1]))
    block_tables = jnp.pad(block_tables, ((0, 0), (0, -block_tables.shape[1] % blocks_per_chunk)))
    settings = (blocks_per_chunk, scale, sliding_window, soft_cap)
    if q.shape[0] == 1:
        # A step of one token is a decode, or a prefill of one token, which is the same sum.
        request, valid = request_of_token(query_start_loc, request_distribution[2], 1)
        attention = _Attention(q, kv_cache, block_tables[request], *settings)
        return attention.decode(jnp.zeros_like(q), seq_lens[request], valid[0].astype(jnp.int32))
    attention = _Attention(q, kv_cache, block_tables, *settings)
    num_decodes, num_requests = request_distribution[0], request_distribution[2]
    out = attention.decode(jnp.zeros_like(q), seq_lens, num_decodes)
    return attention.prefill(out, seq_lens, query_start_loc, num_decodes, num_requests)


class _Attention:
    """The operands that both loops share; `online_softmax` is the arithmetic that both run."""

    def __init__(
        self,
        q: jax.Array,
        kv_cache: jax.Array,
        block_tables: jax.Array,
        blocks_per_chunk: int,
        scale: float,
        sliding_window: int | None,
        soft_cap: float | None,
    ) -> None:
        self.q = q
        self.kv_cache = kv_cache
        self.block_tables = block_tables
        self.blocks_per_chunk = blocks_per_chunk
        self.chunk_tokens = blocks_per_chunk * kv_cache.shape[1]
        self.scale = scale
        self.sliding_window = sliding_window
        self.soft_cap = soft_cap
        self.num_kv_heads = kv_cache.shape[2] // 2
        self.group_size = q.shape[1] // self.num_kv_heads

    def decode(self, out: jax.Array, seq_lens: jax.Array, num_decodes: jax.Array) -> jax.Array:
        """Fills the first `num_decodes` rows of `out` [T, H, D]: request r's one query is row r."""
        num_rows = min(self.q.shape[0], self.block_tables.shape[0])
        is_decode = jnp.arange(num_rows) < num_decodes
        positions = jnp.where(is_decode, seq_lens[:num_rows] - 1, -1)[:, None]
        queries = self.q[:num_rows, None]
        oldest = jnp.min(jnp.where(is_decode[:, None], positions, jnp.iinfo(jnp.int32).max))
        rows = self.online_softmax(queries, self.block_tables[:num_rows], positions, oldest, jnp.max(positions))
        rows = jnp.where(is_decode[:, None, None], rows[:, 0], out[:num_rows])
        return lax.dynamic_update_slice(out, rows, (0, 0, 0))

    def prefill(
        self,
        out: jax.Array,
        seq_lens: jax.Array,
        query_start_loc: jax.Array,
        num_decodes: jax.Array,
        num_requests: jax.Array,
    ) -> jax.Array:
        """Fills the rows of `out` [T, H, D] that belong to requests `num_decodes` to `num_requests`."""
        num_tokens, tile = self.q.shape[0], min(TILE_QUERIES, self.q.shape[0])
        index = jnp.arange(seq_lens.shape[0])
        is_prefill = (index >= num_decodes) & (index < num_requests)
        query_lens = jnp.where(is_prefill, query_start_loc[1:] - query_start_loc[:-1], 0)
        tile_ends = jnp.cumsum((query_lens + tile - 1) // tile)
        # A tile may start too near the end of the batch to be sliced whole.
        q = jnp.pad(self.q, ((0, tile), (0, 0), (0, 0)))

        def one_tile(i: jax.Array, out: jax.Array) -> jax.Array:
            request = jnp.searchsorted(tile_ends, i, side="right")
            tile_start = (i - (tile_ends[request] - (query_lens[request] + tile - 1) // tile)) * tile
            first_row = query_start_loc[request] + tile_start
            in_request = tile_start + jnp.arange(tile) < query_lens[request]
            first_position = seq_lens[request] - query_lens[request] + tile_start
            positions = jnp.where(in_request, first_position + jnp.arange(tile), -1)
            queries = lax.dynamic_slice_in_dim(q, first_row, tile)
            rows = self.online_softmax(
                queries[None], self.block_tables[request][None], positions[None], first_position, jnp.max(positions)
            )[0]
            old_rows = lax.dynamic_slice_in_dim(out, first_row, tile)
            rows = jnp.where(in_request[:, None, None], rows, old_rows)
            return lax.dynamic_update_slice_in_dim(out, rows, first_row, axis=0)

        padded = jnp.pad(out, ((0, tile), (0, 0), (0, 0)))
        return lax.fori_loop(0, tile_ends[-1], one_tile, padded)[:num_tokens]

    def online_softmax(
        self,
        queries: jax.Array,
        block_tables: jax.Array,
        positions: jax.Array,
        first_position: jax.Array,
        last_position: jax.Array,
    ) -> jax.Array:
        """Attention of N requests' Q queries each, chunk by chunk of context.

        Args:
          queries: [N, Q, H, D].
          block_tables: i32 [N, max_blocks], a multiple of `blocks_per_chunk` wide.
          positions: i32 [N, Q]; -1 for a query that is padding.
          first_position, last_position: The smallest and largest of the valid positions.

        Returns:
          [N, Q, H, D]; 0 where the query is padding.
        """
        num, num_queries, _, head_dim = queries.shape
        heads = (num, self.num_kv_heads, self.group_size, num_queries)
        grouped = queries.reshape(num, num_queries, self.num_kv_heads, self.group_size, head_dim)
        grouped = grouped.transpose(0, 2, 3, 1, 4)

        def one_chunk(chunk: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            peak, total, acc = carry
            blocks = lax.dynamic_slice_in_dim(
                block_tables, chunk * self.blocks_per_chunk, self.blocks_per_chunk, axis=1
            )
            context = self.kv_cache[blocks].reshape(num, self.chunk_tokens, 2 * self.num_kv_heads, head_dim)
            k, v = split_kv(context)
            scores = jnp.einsum("nkgqd,nskd->nkgqs", grouped, k, preferred_element_type=jnp.float32) * self.scale
            if self.soft_cap is not None:
                scores = self.soft_cap * jnp.tanh(scores / self.soft_cap)
            context_positions = chunk * self.chunk_tokens + jnp.arange(self.chunk_tokens)
            visible = context_positions <= positions[..., None]
            if self.sliding_window is not None:
                visible &= context_positions > positions[..., None] - self.sliding_window
            scores = jnp.where(visible[:, None, None], scores, -jnp.inf)

            new_peak = jnp.maximum(peak, jnp.max(scores, axis=-1))
            # A query that has seen nothing yet keeps an infinite peak, which must not meet itself in a difference.
            finite_peak = jnp.where(jnp.isfinite(new_peak), new_peak, 0.0)
            weights = jnp.exp(scores - finite_peak[..., None])
            correction = jnp.exp(peak - finite_peak)
            # Blocks beyond a request's own hold other requests' numbers, or none: a NaN there must not spread.
            v = jnp.where(jnp.any(visible, axis=1)[:, :, None, None], v, 0)
            chunk_out = jnp.einsum("nkgqs,nskd->nkgqd", weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
            return new_peak, total * correction + jnp.sum(weights, axis=-1), acc * correction[..., None] + chunk_out

        first = jnp.int32(0)
        if self.sliding_window is not None:
            first = jnp.maximum(first_position - self.sliding_window + 1, 0) // self.chunk_tokens
        init = (
            jnp.full(heads, -jnp.inf, jnp.float32),
            jnp.zeros(heads, jnp.float32),
            jnp.zeros((*heads, head_dim), jnp.float32),
        )
        _, total, acc = lax.fori_loop(first, last_position // self.chunk_tokens + 1, one_chunk, init)
        out = acc / jnp.maximum(total, jnp.finfo(jnp.float32).tiny)[..., None]
        return out.transpose(0, 3, 1, 2, 4).reshape(queries.shape).astype(queries.dtype)
