"""Latent attention to selected tokens in plain JAX: each query gathers the entries that it attends to.

Queries are computed in tiles of a fixed number, padded, for the reason that `index_selection.tiled` gives.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jaxis.kernels.batch import Batch
from jaxis.kernels.latent_attention.layout import decode
from jaxis.kernels.ragged_paged_attention.context_chunks import OnlineSoftmax

TILE_QUERIES = 8
CHUNK_TOKENS = 128


def latent_attention(
    q: jax.Array,
    kv_cache: jax.Array,
    batch: Batch,
    selection: jax.Array,
    *,
    value_dim: int,
    scale: float,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """Attends with each query to its request's cached entries at the positions in `selection`; padding rows are 0."""
    num_tokens = q.shape[0]
    request, _ = batch.request_of_token()
    tables = batch.block_tables
    rows = ((0, -num_tokens % TILE_QUERIES), (0, 0))
    q, request = jnp.pad(q, (*rows, (0, 0))), jnp.pad(request, rows[:1])
    selection = jnp.pad(selection, (rows[0], (0, -selection.shape[1] % CHUNK_TOKENS)), constant_values=-1)

    def one_tile(i: jax.Array, out: jax.Array) -> jax.Array:
        q_tile, own, positions = (
            lax.dynamic_slice_in_dim(x, i * TILE_QUERIES, TILE_QUERIES) for x in (q, tables[request], selection)
        )
        attended = _attend(q_tile, kv_cache, own, positions, value_dim, scale, sinks)
        return lax.dynamic_update_slice_in_dim(out, attended.astype(out.dtype), i * TILE_QUERIES, axis=0)

    num_tiles = (batch.num_tokens + TILE_QUERIES - 1) // TILE_QUERIES
    out = jnp.zeros((*q.shape[:2], value_dim), q.dtype)
    return lax.fori_loop(0, num_tiles, one_tile, out)[:num_tokens]


def _attend(
    q: jax.Array,
    kv_cache: jax.Array,
    block_tables: jax.Array,
    positions: jax.Array,
    value_dim: int,
    scale: float,
    sinks: jax.Array | None,
) -> jax.Array:
    """Attention of a tile's queries [N, H, D] to the entries at `positions` i32 [N, S] of their tables -> [N, H, V]."""
    block_size = kv_cache.shape[1]

    def one_chunk(chunk: jax.Array, carry: OnlineSoftmax) -> OnlineSoftmax:
        listed = lax.dynamic_slice_in_dim(positions, chunk * CHUNK_TOKENS, CHUNK_TOKENS, axis=1)
        visible = listed >= 0
        position = jnp.maximum(listed, 0)
        block = jnp.take_along_axis(block_tables, position // block_size, axis=1)
        context = decode(kv_cache[block, position % block_size, 0], value_dim, q.shape[-1])
        # Entries of no listed position may be garbage: a NaN there must not spread.
        context = jnp.where(visible[..., None], context, 0)
        scores = jnp.einsum("nhd,nsd->nhs", q, context, preferred_element_type=jnp.float32) * scale
        carry, weights = carry.add_scores(jnp.where(visible[:, None], scores, -jnp.inf))
        values = context[..., :value_dim]
        return carry.add_values(
            jnp.einsum("nhs,nsd->nhd", weights.astype(values.dtype), values, preferred_element_type=jnp.float32)
        )

    num_chunks = (jnp.max(jnp.sum(positions >= 0, axis=1)) + CHUNK_TOKENS - 1) // CHUNK_TOKENS
    return lax.fori_loop(0, num_chunks, one_chunk, OnlineSoftmax.empty(q.shape[:2], value_dim)).output(sinks)
