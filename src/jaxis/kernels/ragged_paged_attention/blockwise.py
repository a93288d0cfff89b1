"""Ragged paged attention in plain JAX, without work on padding.

Context is read in chunks of whole blocks with an online softmax (arXiv:2205.14135), so memory does not grow with the
context and one compiled program serves every length: the loops' trip counts come from the data. Decodes (one query per
request) go through one loop, all requests at once; prefills go through another, in tiles of consecutive queries.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from jaxis.config.attention_span import FULL_CONTEXT, AttentionSpan
from jaxis.kernels.batch import Batch
from jaxis.kernels.ragged_paged_attention.context_chunks import (
    OnlineSoftmax,
    biases,
    blocks_of_chunk,
    product,
    whole_chunks,
)
from jaxis.kernels.ragged_paged_attention.layout import read_blocks, split_kv

# Context tokens read at a time, and queries per prefill tile: large enough for efficient matrix products, small enough
# to stay in cache. Decodes read less at a time, because every request reads as many chunks as the longest; and no more
# than a TPU keeps in VMEM.
PREFILL_CHUNK_TOKENS = 256
DECODE_CHUNK_TOKENS = 128
DECODE_CHUNK_BYTES = 4 << 20
TILE_QUERIES = 64


def ragged_paged_attention(
    q: jax.Array,
    kv_cache: jax.Array,
    batch: Batch,
    *,
    scale: float,
    span: AttentionSpan = FULL_CONTEXT,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    bias: jax.Array | None = None,
    read_blocks: Callable[[jax.Array, jax.Array], jax.Array] = read_blocks,
) -> jax.Array:
    """Attends with each query to its request's cached tokens; padding rows are 0.

    `read_blocks` maps the cache and blocks [...] to their entries, [..., block_size, 2 * K, D].
    """
    attention = _Attention(q, kv_cache, batch.block_tables, scale, span, soft_cap, sinks, bias, read_blocks)
    if q.shape[0] == 1:
        # A step of one token is a decode, or a prefill of one token, which is the same sum.
        request, valid = batch.request_of_token()
        attention = dataclasses.replace(attention, block_tables=batch.block_tables[request])
        return attention.decode(jnp.zeros_like(q), batch.seq_lens[request], valid[0].astype(jnp.int32))
    out = attention.decode(jnp.zeros_like(q), batch.seq_lens, batch.request_distribution[0])
    return attention.prefill(out, batch)


@dataclass(frozen=True)
class _Attention:
    q: jax.Array
    kv_cache: jax.Array
    block_tables: jax.Array
    scale: float
    span: AttentionSpan
    soft_cap: float | None
    sinks: jax.Array | None
    bias: jax.Array | None
    read_blocks: Callable[[jax.Array, jax.Array], jax.Array]

    @property
    def block_shape(self) -> tuple[int, int, int]:
        """Returns (block_size, 2 * K, D), the shape of a block's entries."""
        one_block = jax.ShapeDtypeStruct((), jnp.int32)
        return jax.eval_shape(self.read_blocks, self.kv_cache, one_block).shape

    @property
    def num_kv_heads(self) -> int:
        return self.block_shape[1] // 2

    @property
    def group_size(self) -> int:
        return self.q.shape[1] // self.num_kv_heads

    def decode(self, out: jax.Array, seq_lens: jax.Array, num_decodes: jax.Array) -> jax.Array:
        """Fills the first `num_decodes` rows of `out` [T, H, D]; request r's only query is row r."""
        num_rows = min(self.q.shape[0], self.block_tables.shape[0])
        is_decode = jnp.arange(num_rows) < num_decodes
        positions = jnp.where(is_decode, seq_lens[:num_rows] - 1, -1)
        rows = self._of_rows(lambda x: x[:num_rows])._attend_decodes(self.block_tables[:num_rows], positions)
        rows = jnp.where(is_decode[:, None, None], rows, out[:num_rows])
        return lax.dynamic_update_slice(out, rows, (0, 0, 0))

    def _of_rows(self, rows_of: Callable[[jax.Array], jax.Array]) -> _Attention:
        """Returns the attention with these rows of what each token has: queries, and any biases and sinks."""
        operands = {name: getattr(self, name) for name in ("q", "sinks", "bias")}
        own = {name: rows_of(x) for name, x in operands.items() if x is not None and x.ndim > 1}
        return dataclasses.replace(self, **own)

    def _attend_decodes(self, block_tables: jax.Array, positions: jax.Array) -> jax.Array:
        """Attends with one query per request, q [N, H, D], of all requests at once; returns [N, H, D].

        Multiplies every query head with every kv head and drops the foreign ones. That is K times the arithmetic, but
        the products read the gathered blocks in their memory layout: selecting each head's own first would transpose
        them, which is far slower in a step bound by memory. Block tables are i32 [N, max_blocks], positions i32 [N] (-1
        for padding). Each request's chunks begin with the first that its query sees.
        """
        queries = self.q
        num, num_heads, head_dim = queries.shape
        block_size = self.block_shape[0]
        token_bytes = num * math.prod(self.block_shape[1:]) * queries.dtype.itemsize
        most_tokens = min(DECODE_CHUNK_TOKENS, DECODE_CHUNK_BYTES // token_bytes)
        chunk_tokens, block_tables = whole_chunks(block_tables, block_size, most_tokens)
        num_kv_heads = self.num_kv_heads
        # A key and its value are adjacent; zeros mask out the value.
        padded_queries = jnp.concatenate([queries, jnp.zeros_like(queries)], axis=-1)
        is_own = jnp.arange(num_heads)[:, None] // self.group_size == jnp.arange(num_kv_heads)
        first = self.span.first_visible(positions) // chunk_tokens

        def one_chunk(index: jax.Array, carry: OnlineSoftmax) -> OnlineSoftmax:
            chunk = first + index
            # A decode is its sequence's last token.
            tokens = (chunk * chunk_tokens)[:, None] + jnp.arange(chunk_tokens)
            visible = self._visible(tokens, positions[:, None], positions)
            blocks = jax.vmap(lambda table, chunk: blocks_of_chunk(table, chunk, chunk_tokens // block_size))
            # Gather before reshaping: XLA would copy a reshaped cache that this step has written to.
            context = self.read_blocks(self.kv_cache, blocks(block_tables, chunk))
            context = context.reshape(num, chunk_tokens, num_kv_heads, 2 * head_dim)
            # Blocks past a request's own hold other requests' entries, or garbage: a NaN there must not spread.
            context = jnp.where(visible[..., None, None], context, 0)
            context = context.reshape(num, chunk_tokens * num_kv_heads, 2 * head_dim)

            scores = product("nhd,nsd->nhs", padded_queries, context)
            scores = scores.reshape(num, num_heads, chunk_tokens, num_kv_heads)
            scores = jnp.sum(jnp.where(is_own[:, None], scores, 0), axis=-1)
            bias = None if self.bias is None else biases(self.bias, positions[:, None] - tokens)
            carry, weights = carry.add_scores(self._masked(scores, visible[:, None], bias))
            weights = jnp.where(is_own[:, None], weights[..., None].astype(context.dtype), 0)
            weights = weights.reshape(num, num_heads, chunk_tokens * num_kv_heads)
            return carry.add_values(product("nhs,nsd->nhd", weights, context)[..., head_dim:])

        num_chunks = jnp.max(positions // chunk_tokens - first) + 1
        result = lax.fori_loop(0, num_chunks, one_chunk, OnlineSoftmax.empty((num, num_heads), head_dim))
        return result.output(self.sinks).astype(queries.dtype)

    def prefill(self, out: jax.Array, batch: Batch) -> jax.Array:
        """Fills the rows of `out` [T, H, D] that belong to requests which are no decodes."""
        seq_lens, query_start_loc = batch.seq_lens, batch.query_start_loc
        num_tokens, tile = self.q.shape[0], min(TILE_QUERIES, self.q.shape[0])
        index = jnp.arange(seq_lens.shape[0])
        query_lens = jnp.where(index >= batch.request_distribution[0], batch.query_lens, 0)
        tile_ends = jnp.cumsum((query_lens + tile - 1) // tile)
        # Padded, because a tile that starts near the end of the batch must still be sliced whole.
        padded = self._of_rows(lambda x: jnp.pad(x, ((0, tile), *((0, 0),) * (x.ndim - 1))))

        def one_tile(i: jax.Array, out: jax.Array) -> jax.Array:
            request = jnp.searchsorted(tile_ends, i, side="right")
            tile_start = (i - (tile_ends[request] - (query_lens[request] + tile - 1) // tile)) * tile
            first_row = query_start_loc[request] + tile_start
            in_request = tile_start + jnp.arange(tile) < query_lens[request]
            first_position = seq_lens[request] - query_lens[request] + tile_start
            positions = jnp.where(in_request, first_position + jnp.arange(tile), -1)
            own = padded._of_rows(lambda x: lax.dynamic_slice_in_dim(x, first_row, tile))
            rows = own._attend_tile(self.block_tables[request], positions, first_position, seq_lens[request])
            old_rows = lax.dynamic_slice_in_dim(out, first_row, tile)
            rows = jnp.where(in_request[:, None, None], rows, old_rows)
            return lax.dynamic_update_slice_in_dim(out, rows, first_row, axis=0)

        out = jnp.pad(out, ((0, tile), (0, 0), (0, 0)))
        return lax.fori_loop(0, tile_ends[-1], one_tile, out)[:num_tokens]

    def _attend_tile(
        self,
        block_table: jax.Array,
        positions: jax.Array,
        first_position: jax.Array,
        seq_len: jax.Array,
    ) -> jax.Array:
        """Attention for Q consecutive queries of one request, q [Q, H, D]; 0 for padding, of positions i32 [Q] -1.

        `block_table` is i32 [max_blocks], `first_position` the smallest valid position, `seq_len` the request's length.
        """
        queries = self.q
        num_queries, _, head_dim = queries.shape
        block_size = self.block_shape[0]
        chunk_tokens, block_table = whole_chunks(block_table, block_size, PREFILL_CHUNK_TOKENS)
        grouped = queries.reshape(num_queries, self.num_kv_heads, self.group_size, head_dim).transpose(1, 2, 0, 3)
        ends = jnp.where(positions >= 0, self.span.last_visible(positions, seq_len), -1)

        def one_chunk(chunk: jax.Array, carry: OnlineSoftmax) -> OnlineSoftmax:
            tokens = chunk * chunk_tokens + jnp.arange(chunk_tokens)
            visible = self._visible(tokens, positions[:, None], ends)
            blocks = blocks_of_chunk(block_table, chunk, chunk_tokens // block_size)
            context = self.read_blocks(self.kv_cache, blocks)
            k, v = split_kv(context.reshape(chunk_tokens, 2 * self.num_kv_heads, head_dim))
            scores = product("kgqd,skd->kgqs", grouped, k)
            bias = None
            if self.bias is not None:
                bias = biases(self.bias, positions[:, None] - tokens).swapaxes(0, 1).reshape(scores.shape)
            carry, weights = carry.add_scores(self._masked(scores, visible, bias))
            # A NaN in blocks that are not the request's own must not spread.
            v = jnp.where(jnp.any(visible, axis=0)[:, None, None], v, 0)
            return carry.add_values(product("kgqs,skd->kgqd", weights.astype(v.dtype), v))

        first = self.span.first_visible(first_position) // chunk_tokens
        last = jnp.max(ends) // chunk_tokens
        heads = (self.num_kv_heads, self.group_size, num_queries)
        result = lax.fori_loop(first, last + 1, one_chunk, OnlineSoftmax.empty(heads, head_dim))
        sinks = None if self.sinks is None else self.sinks.T.reshape(*heads[:2], -1)
        return result.output(sinks).transpose(2, 0, 1, 3).reshape(queries.shape).astype(queries.dtype)

    def _visible(self, context_positions: jax.Array, positions: jax.Array, last_visible: jax.Array) -> jax.Array:
        """Returns bool [N, S]: those of tokens i32 [S] or [N, S] that queries at positions i32 [N, 1] see.

        The last token that each query sees is i32 [N].
        """
        first = self.span.first_visible(positions)
        return (context_positions >= first) & (context_positions <= last_visible[:, None])

    def _masked(self, scores: jax.Array, visible: jax.Array, bias: jax.Array | None) -> jax.Array:
        scores = scores * self.scale
        if bias is not None:
            scores = scores + bias
        if self.soft_cap is not None:
            scores = self.soft_cap * jnp.tanh(scores / self.soft_cap)
        return jnp.where(visible, scores, -jnp.inf)
