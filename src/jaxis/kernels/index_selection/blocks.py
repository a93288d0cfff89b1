"""Selection of blocks of G consecutive tokens for each head of queries, by the best of a block's keys (MiniMax M3).

Each token has a key. A block's score for a head is the largest product of the head's query with the keys that it sees.
A query's own block is always selected; of equal scores, earlier blocks come first.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import lax

from jaxis.kernels.batch import Batch, sees_in_request
from jaxis.kernels.index_selection import cpu
from jaxis.kernels.index_selection.tiled import TILE_QUERIES, write_keys
from jaxis.kernels.paged_cache import PagedCache
from jaxis.kernels.platform import target_platform
from jaxis.kernels.ragged_paged_attention.context_chunks import blocks_of_chunk, product, whole_chunks
from jaxis.kernels.ragged_paged_attention.layout import decode

CHUNK_TOKENS = 1024


def select_blocks(
    q: jax.Array,
    keys: jax.Array,
    key_cache: PagedCache,
    batch: Batch,
    *,
    num_blocks: int,
    group_size: int,
) -> tuple[PagedCache, jax.Array]:
    """Writes this step's keys [T, D], then returns the cache and each head's tokens i32 [T, H, num_blocks * G].

    Takes the other arguments of `select_tokens`. Positions are ascending, then -1; padding selects none.
    """
    num_tokens, sizes = q.shape[0], {"num_blocks": num_blocks, "group_size": group_size}
    request, valid = batch.request_of_token()
    last = jnp.where(valid, batch.positions, -1)
    if key_cache.layout.kernels == "native":
        array, blocks = cpu.select_blocks(q, keys, key_cache.array, batch, **sizes)
    else:
        array = write_keys(key_cache.array, keys, batch)
        blocks = _best_blocks(q, array, last, batch.block_tables[request], batch.num_tokens, **sizes)
    blocks = blocks[..., None]
    tokens = blocks * group_size + jnp.arange(group_size, dtype=jnp.int32)
    tokens = jnp.where((blocks >= 0) & (tokens <= last[:, None, None, None]), tokens, -1)
    return key_cache.layout.cache(array), tokens.reshape(num_tokens, q.shape[1], -1)


def _best_blocks(
    q: jax.Array,
    key_cache: jax.Array,
    last: jax.Array,
    block_tables: jax.Array,
    num_rows: jax.Array,
    *,
    num_blocks: int,
    group_size: int,
) -> jax.Array:
    """Returns the blocks i32 [T, H, num_blocks] of queries at positions `last` i32 [T], ascending, then -1.

    Takes a table of blocks for each query. Rows from `num_rows` i32 [] on select none.
    """
    num_tokens = q.shape[0]
    tile_size = 1 if target_platform() == "cpu" else TILE_QUERIES
    rows = (0, -num_tokens % tile_size)
    last = jnp.pad(last, rows, constant_values=-1)
    operands = (jnp.pad(q, (rows, (0, 0), (0, 0))), jnp.pad(block_tables, (rows, (0, 0))), last)

    def one_tile(i: jax.Array, selected: jax.Array) -> jax.Array:
        q_tile, tables, positions = (lax.dynamic_slice_in_dim(x, i * tile_size, tile_size) for x in operands)

        def best() -> jax.Array:
            scores = _scores(q_tile, key_cache, tables, positions, group_size)
            return best_blocks(scores, (positions // group_size)[:, None], num_blocks)

        def every() -> jax.Array:
            block = jnp.arange(num_blocks, dtype=jnp.int32)
            return jnp.broadcast_to(block, (tile_size, q.shape[1], num_blocks))

        blocks = lax.cond(jnp.max(positions) < num_blocks * group_size, every, best)
        return lax.dynamic_update_slice_in_dim(selected, blocks, i * tile_size, axis=0)

    none = jnp.full((len(last), q.shape[1], num_blocks), -1, jnp.int32)
    return lax.fori_loop(0, (num_rows + tile_size - 1) // tile_size, one_tile, none)[:num_tokens]


def _scores(q: jax.Array, key_cache: jax.Array, block_tables: jax.Array, last: jax.Array, group_size: int) -> jax.Array:
    """Returns the scores float32 [N, H, blocks] of contexts up to `last` i32 [N] for q [N, H, D]; -inf past them."""
    cache_block = key_cache.shape[1]
    # The sizes of the cache's blocks and of these need not divide each other.
    unit = math.lcm(cache_block, group_size)
    chunk_tokens, block_tables = whole_chunks(
        jnp.pad(block_tables, ((0, 0), (0, -block_tables.shape[1] % (unit // cache_block)))),
        cache_block,
        -(-CHUNK_TOKENS // unit) * unit,
    )

    def one_chunk(chunk: jax.Array, scores: jax.Array) -> jax.Array:
        visible = chunk * chunk_tokens + jnp.arange(chunk_tokens) <= last[:, None]
        cached = key_cache[blocks_of_chunk(block_tables, chunk, chunk_tokens // cache_block)]
        keys = decode(cached).reshape(len(q), chunk_tokens, -1)
        # Blocks past a request's own hold other requests' keys, or garbage: a NaN there must not spread.
        keys = jnp.where(visible[..., None], keys, 0).astype(jnp.float32)
        products = jnp.where(visible[:, None], product("nhd,nsd->nhs", q.astype(jnp.float32), keys), -jnp.inf)
        of_blocks = jnp.max(products.reshape(*products.shape[:2], -1, group_size), axis=-1)
        return lax.dynamic_update_slice_in_dim(scores, of_blocks, chunk * (chunk_tokens // group_size), axis=2)

    num_blocks = block_tables.shape[1] * cache_block // group_size
    scores = jnp.full((*q.shape[:2], num_blocks), -jnp.inf, jnp.float32)
    return lax.fori_loop(0, jnp.max(last) // chunk_tokens + 1, one_chunk, scores)


def best_blocks(scores: jax.Array, own: jax.Array, num_blocks: int) -> jax.Array:
    """Returns the best blocks i32 [..., num_blocks], ascending, then -1, for scores [..., S]; `own` is among them."""
    size = max(scores.shape[-1], num_blocks)
    rows = [(0, 0)] * (scores.ndim - 1)
    scores = jnp.pad(scores, (*rows, (0, size - scores.shape[-1])), constant_values=-jnp.inf)
    scores = jnp.where(jnp.arange(size) == own[..., None], jnp.inf, scores)
    found, best = lax.top_k(scores, num_blocks)
    best = jnp.sort(jnp.where(found > -jnp.inf, best, size).astype(jnp.int32), axis=-1)
    return jnp.where(best < size, best, -1)


def select_blocks_of_whole_sequences(
    q: jax.Array,
    keys: jax.Array,
    batch: Batch,
    *,
    num_blocks: int,
    group_size: int,
) -> jax.Array:
    """Returns bool [H, T, T], True where a head of a token of a batch of whole sequences attends to another token."""
    request, valid = batch.request_of_token()
    visible = sees_in_request(request, valid)
    products = product("thd,sd->sht", q.astype(jnp.float32), keys.astype(jnp.float32))
    products = jnp.where(visible.T[:, None], products, -jnp.inf)
    # A block has the number of its first token's row.
    block = jnp.arange(q.shape[0]) - batch.positions % group_size
    return visible & best_blocks_of_whole_sequences(products, block, block, num_blocks)


def best_blocks_of_whole_sequences(scores: jax.Array, block: jax.Array, own: jax.Array, num_blocks: int) -> jax.Array:
    """Returns bool [H, T, S], True for the keys in a query's best blocks, for scores [S, H, T] of keys that it sees.

    `block` i32 [S] is the number of each key's block, below S; `own` i32 [T] that of the query's, which is among them.
    """
    num_keys = len(block)
    scores = jnp.moveaxis(jax.ops.segment_max(scores, block, num_segments=num_keys), 0, -1)
    scores = jnp.where(jnp.arange(num_keys) == own[:, None], jnp.inf, scores)
    found, best = lax.top_k(scores, min(num_blocks, num_keys))
    head, token = jnp.arange(scores.shape[0])[:, None, None], jnp.arange(len(own))[:, None]
    chosen = jnp.zeros(scores.shape, bool).at[head, token, best].set(found > -jnp.inf)
    return chosen[..., block]
