"""Attention inside a Triton kernel: a tile of queries that share a kv head attends to its request's paged context.

Context is read in chunks with an online softmax (arXiv:2205.14135), by a loop whose length may come from data.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jax.typing import DTypeLike

from jaxis.config.attention_span import FULL_CONTEXT, AttentionSpan
from jaxis.kernels.batch import Batch
from jaxis.kernels.ragged_paged_attention.gpu_rows import load, padded_size

LOG2_E = math.log2(math.e)
# The score of a token that a query does not see. Finite, because -inf - -inf is NaN: a query that has seen nothing yet
# collects weights relative to this, which the first real score then multiplies by exactly 0.
MASKED = -1e30


class Chunk(NamedTuple):
    """N consecutive context tokens of one kv head.

    Attributes:
      keys: Parts of the keys, each [N, size], with the sizes of the parts of the queries.
      key_scales: Factor of each part's products, float32 [N]; None for 1.
      values: [N, value size].
      value_scale: float32 [N], or None for 1.
    """

    keys: tuple[jax.Array, ...]
    key_scales: tuple[jax.Array | None, ...]
    values: jax.Array
    value_scale: jax.Array | None


class TileSize(NamedTuple):
    """Sizes of a program's tile, and its threads.

    Attributes:
      rows: M, queries times heads; a power of two.
      tokens: N, context tokens of a chunk; a power of two.
      num_warps: Warps of 32 threads.
      num_stages: Chunks in flight.
    """

    rows: int
    tokens: int
    num_warps: int
    num_stages: int

    @property
    def compiler_params(self) -> plgpu.CompilerParams:
        return plgpu.CompilerParams(num_warps=self.num_warps, num_stages=self.num_stages)


@dataclass(frozen=True)
class PagedAttention:
    """Computation that a program is compiled for.

    Attributes:
      num_kv_heads: K.
      group_size: Query heads that share a kv head.
      query_parts: Offset and size of each part of a query; scores are the sum of the parts' products.
      block_size: B, tokens per block of the cache.
      dtype: Type of products.
      read_chunk: (cache, blocks [N], offsets in them [N], kv head, mask of tokens to read [N], type) -> Chunk with
        zeros for masked tokens.
      soft_cap: Bound of the scores, or None.
    """

    num_kv_heads: int
    group_size: int
    query_parts: tuple[tuple[int, int], ...]
    value_dim: int
    block_size: int
    dtype: DTypeLike
    read_chunk: Callable[..., Chunk]
    scale: float
    span: AttentionSpan = FULL_CONTEXT
    soft_cap: float | None = None

    def num_head_tiles(self, rows: int) -> int:
        return self.num_kv_heads * pl.cdiv(self.group_size, rows)

    def multiply(self, a: jax.Array, b: jax.Array, contract: tuple[int, int]) -> jax.Array:
        precision = lax.Precision.HIGHEST if self.dtype == jnp.float32 else None
        dimensions = (((contract[0],), (contract[1],)), ((), ()))
        return lax.dot_general(a, b, dimensions, precision=precision, preferred_element_type=jnp.float32)

    def scores(self, queries: tuple[jax.Array, ...], chunk: Chunk) -> jax.Array:
        """Returns scores [M, N], in units of log2."""
        products = [self.multiply(query, key, (1, 1)) for query, key in zip(queries, chunk.keys, strict=True)]
        scaled = [x if scale is None else x * scale for x, scale in zip(products, chunk.key_scales, strict=True)]
        total = sum(scaled[1:], start=scaled[0])
        if self.soft_cap is None:
            return total * (self.scale * LOG2_E)
        return jnp.tanh(total * (self.scale / self.soft_cap)) * (self.soft_cap * LOG2_E)

    def visible(self, tokens: jax.Array, positions: jax.Array) -> jax.Array:
        """Returns bool [M, N]: the tokens [N] that queries at positions [M] see."""
        visible = tokens[None, :] <= positions[:, None]
        if self.span == FULL_CONTEXT:
            return visible
        return visible & (tokens[None, :] >= self.span.first_visible(positions)[:, None])


class HeadTile(NamedTuple):
    """Rows of a tile: consecutive queries of one request, each with heads of one group.

    Attributes:
      query: i32 [M], counted from the tile's first query.
      head: i32 [M], query heads.
      kv_head: Kv head that they share.
      exists: bool [M]; False for rows that only fill up the tile.
    """

    query: jax.Array
    head: jax.Array
    kv_head: jax.Array
    exists: jax.Array

    @classmethod
    def of(cls, attention: PagedAttention, rows: int, heads: int, head_tile: jax.Array) -> HeadTile:
        """Returns tile number `head_tile` of `attention.num_head_tiles(rows)`, with `heads` heads of each query."""
        per_group = pl.cdiv(attention.group_size, rows)
        kv_head, first = lax.div(head_tile, per_group), lax.rem(head_tile, per_group) * heads
        row = jnp.arange(rows, dtype=jnp.int32)
        query, head = lax.div(row, jnp.full_like(row, heads)), first + lax.rem(row, jnp.full_like(row, heads))
        exists = (query < rows // heads) & (head < attention.group_size)
        return cls(query, kv_head * attention.group_size + head, kv_head, exists)


class SoftmaxSums(NamedTuple):
    """Sums of a softmax over part of a context: arrays, or references to those of all parts.

    Attributes:
      peak: float32 [M], the largest score, in units of log2.
      total: float32 [M], the sum of the weights relative to it.
      values: float32 [M, value size], the sum of the weighted values.
    """

    peak: Any
    total: Any
    values: Any


def attend(
    attention: PagedAttention,
    queries: tuple[jax.Array, ...],
    positions: jax.Array,
    cache_ref: Any,
    batch: Batch,
    request: jax.Array,
    kv_head: jax.Array,
    context: tuple[Any, Any, Any],
    chunk_tokens: int,
    sums: SoftmaxSums,
) -> SoftmaxSums:
    """Adds part of a request's context to the sums of a tile of its queries, which share a kv head.

    Queries are in parts, each [M, size], at positions i32 [M]. `context` has the begin (a multiple of `chunk_tokens` N)
    and end of the part, and the first token to read, which lies in the first chunk.
    """
    begin, end, first = context

    def one_chunk(index: jax.Array, sums: SoftmaxSums) -> SoftmaxSums:
        tokens = index * chunk_tokens + jnp.arange(chunk_tokens, dtype=jnp.int32)
        # Entries past a request's own are other requests', or garbage: a NaN there must not spread.
        own = (tokens >= first) & (tokens < end)
        block_size = jnp.full_like(tokens, attention.block_size)
        blocks = load(batch.block_tables, (request, lax.div(tokens, block_size)), own)
        offsets = lax.rem(tokens, block_size)
        chunk = attention.read_chunk(cache_ref, blocks, offsets, kv_head, own, attention.dtype)
        scores = jnp.where(attention.visible(tokens, positions), attention.scores(queries, chunk), MASKED)
        peak = jnp.maximum(sums.peak, jnp.max(scores, axis=1))
        weights = jnp.exp2(scores - peak[:, None])
        correction = jnp.exp2(sums.peak - peak)
        total = sums.total * correction + jnp.sum(weights, axis=1)
        if chunk.value_scale is not None:
            weights = weights * chunk.value_scale[None, :]
        weighted = attention.multiply(weights.astype(attention.dtype), chunk.values, (1, 0))
        return SoftmaxSums(peak, total, sums.values * correction[:, None] + weighted)

    return lax.fori_loop(lax.div(begin, chunk_tokens), pl.cdiv(end, chunk_tokens), one_chunk, sums)


def empty_sums(rows: int, value_dim: int) -> SoftmaxSums:
    peak = jnp.full((rows,), MASKED, jnp.float32)
    return SoftmaxSums(peak, jnp.zeros_like(peak), jnp.zeros((rows, padded_size(value_dim)), jnp.float32))
