"""The selection from a cache in plain JAX.

Queries are computed in tiles of a fixed number, padded, and contexts in chunks of a fixed number of tokens. Products
thus have the same shapes in every step, and a compiler has no reason to sum them differently.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from jaxis.kernels.batch import Batch
from jaxis.kernels.index_selection.reference import scores_of_keys
from jaxis.kernels.ragged_paged_attention.context_chunks import blocks_of_chunk, whole_chunks
from jaxis.kernels.ragged_paged_attention.layout import decode, encode

TILE_QUERIES = 8
CHUNK_TOKENS = 256


def select_tokens(
    q: jax.Array,
    weights: jax.Array,
    keys: jax.Array,
    key_cache: jax.Array,
    batch: Batch,
    *,
    num_selected: int,
    always: tuple[int, int] = (0, 0),
) -> tuple[jax.Array, jax.Array]:
    request, valid = batch.request_of_token()
    key_cache = write_keys(key_cache, keys, batch)
    last = jnp.where(valid, batch.positions, -1)
    of_batch = (request, batch.block_tables, batch.num_tokens)
    return key_cache, best_keys(q, weights, key_cache, last, *of_batch, num_selected=num_selected, always=always)


def best_keys(
    q: jax.Array,
    weights: jax.Array,
    key_cache: jax.Array,
    last: jax.Array,
    request: jax.Array,
    block_tables: jax.Array,
    num_rows: jax.Array,
    *,
    num_selected: int,
    always: tuple[int, int] = (0, 0),
) -> jax.Array:
    """Returns the numbers i32 [T, K] of the best keys of each query, ascending, then -1.

    Query t sees the keys up to number `last` i32 [T] of its `request` i32 [T]; none if that is -1, as in rows from
    `num_rows` i32 [] on.
    """
    selected = _all_up_to(last, num_selected)
    if block_tables.shape[1] * key_cache.shape[1] <= num_selected:
        return selected

    def of_tile(
        selected: jax.Array, q: jax.Array, weights: jax.Array, request: jax.Array, positions: jax.Array
    ) -> jax.Array:
        def best() -> jax.Array:
            scores = scores_of_contexts(q, weights, key_cache, block_tables[request], positions, num_selected)
            number, last = jnp.arange(scores.shape[1]), positions[:, None]
            is_always = (number < always[0]) | ((number > last - always[1]) & (number <= last))
            scores = jnp.where(is_always, jnp.inf, scores)
            return jnp.where((positions < num_selected)[:, None], selected, _best(scores, num_selected))

        return lax.cond(jnp.max(positions) < num_selected, lambda: selected, best)

    return by_tiles(of_tile, selected, q, weights, request, last, num_rows=num_rows)


def by_tiles(
    function: Callable[..., jax.Array], given: jax.Array, *operands: jax.Array, num_rows: jax.Array
) -> jax.Array:
    """Returns `given` [T, K], whose rows up to `num_rows` become those that `function` makes.

    It maps `TILE_QUERIES` rows of `given` and of the operands [T, ...] to rows [N, K].
    """
    padding = -given.shape[0] % TILE_QUERIES
    padded, *rest = (jnp.pad(x, [(0, padding)] + [(0, 0)] * (x.ndim - 1)) for x in (given, *operands))

    def one_tile(i: jax.Array, out: jax.Array) -> jax.Array:
        rows = (lax.dynamic_slice_in_dim(x, i * TILE_QUERIES, TILE_QUERIES) for x in (out, *rest))
        return lax.dynamic_update_slice_in_dim(out, function(*rows), i * TILE_QUERIES, axis=0)

    num_tiles = (num_rows + TILE_QUERIES - 1) // TILE_QUERIES
    return lax.fori_loop(0, num_tiles, one_tile, padded)[: given.shape[0]]


def write_keys(key_cache: jax.Array, keys: jax.Array, batch: Batch) -> jax.Array:
    """Writes keys [T, D] at their positions; padding writes nothing."""
    num_blocks, block_size, _ = key_cache.shape
    places = batch.places(block_size, num_blocks)
    return key_cache.at[places.block, places.offset].set(encode(keys, key_cache.dtype), mode="drop")


def _all_up_to(last: jax.Array, num_selected: int) -> jax.Array:
    """Returns i32 [T, K]: 0, 1, ... up to last i32 [T], then -1."""
    position = jnp.arange(num_selected, dtype=jnp.int32)
    return jnp.where(position <= last[:, None], position, -1)


def scores_of_contexts(
    q: jax.Array,
    weights: jax.Array,
    key_cache: jax.Array,
    block_tables: jax.Array,
    last: jax.Array,
    num_selected: int,
) -> jax.Array:
    """Returns the scores of a tile's queries for their contexts, float32 [N, S]; -inf past each query.

    Takes q [N, H, D], weights float32 [N, H], block tables i32 [N, max_blocks], and last i32 [N]: the position of each
    query, -1 for padding. S is at least `num_selected`.
    """
    num, block_size = q.shape[0], key_cache.shape[1]
    chunk_tokens, block_tables = whole_chunks(block_tables, block_size, CHUNK_TOKENS)
    context_len = max(block_tables.shape[1] * block_size, num_selected)

    def one_chunk(chunk: jax.Array, scores: jax.Array) -> jax.Array:
        position = chunk * chunk_tokens + jnp.arange(chunk_tokens)
        visible = position <= last[:, None]
        # Gathered before it is reshaped: XLA would copy a reshaped cache that this step has written to.
        cached = key_cache[blocks_of_chunk(block_tables, chunk, chunk_tokens // block_size)]
        keys = decode(cached).reshape(num, chunk_tokens, -1)
        # Blocks past a request's own hold other requests' keys, or garbage: a NaN there must not spread.
        keys = jnp.where(visible[..., None], keys, 0).astype(jnp.promote_types(keys.dtype, q.dtype))
        found = scores_of_keys(q[:, None], weights[:, None], keys)[:, 0]
        found = jnp.where(visible, found, -jnp.inf)
        return lax.dynamic_update_slice_in_dim(scores, found, chunk * chunk_tokens, axis=1)

    scores = jnp.full((num, context_len), -jnp.inf, jnp.float32)
    return lax.fori_loop(0, jnp.max(last) // chunk_tokens + 1, one_chunk, scores)


def _best(scores: jax.Array, num_selected: int) -> jax.Array:
    """Returns the positions i32 [N, K] of the best scores, ascending; of equal scores, `top_k` takes the first."""
    _, best = lax.top_k(scores, num_selected)
    return jnp.sort(best.astype(jnp.int32), axis=-1)
