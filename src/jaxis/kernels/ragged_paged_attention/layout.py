"""The layout of the paged KV cache and of a flat batch, in one place for every implementation.

A layer's cache is `[num_blocks, block_size, 2 * K, D]`; along the third axis each kv head's key stands before its
value. That is the layout of JAX's own TPU kernel, and it keeps a head's keys and values on one device when kv heads
are sharded.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def split_kv(context: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Cached entries [..., 2 * K, D] -> keys and values, each [..., K, D]."""
    *lead, combined, head_dim = context.shape
    pairs = context.reshape(*lead, combined // 2, 2, head_dim)
    return pairs[..., 0, :], pairs[..., 1, :]


def request_of_token(
    query_start_loc: jax.Array, num_requests: jax.Array, num_tokens: int
) -> tuple[jax.Array, jax.Array]:
    """For each of the flat batch's T tokens: its request's index i32 [T], and whether it is one at all (bool [T]).

    Padding tokens, which follow the last request's, get the last request's index and False.
    """
    token = jnp.arange(num_tokens, dtype=jnp.int32)
    request = jnp.searchsorted(query_start_loc[1:], token, side="right").astype(jnp.int32)
    valid = token < query_start_loc[num_requests]
    return jnp.minimum(request, query_start_loc.shape[0] - 2), valid


def write_kv_cache(
    kv_cache: jax.Array,
    k: jax.Array,
    v: jax.Array,
    positions: jax.Array,
    block_tables: jax.Array,
    query_start_loc: jax.Array,
    request_distribution: jax.Array,
) -> jax.Array:
    """Writes this step's keys and values [T, K, D] where their positions [T] fall; padding tokens write nothing."""
    num_blocks, block_size, combined, head_dim = kv_cache.shape
    num_tokens = k.shape[0]
    request, valid = request_of_token(query_start_loc, request_distribution[2], num_tokens)
    block = block_tables[request, jnp.minimum(positions // block_size, block_tables.shape[1] - 1)]
    num_slots = num_blocks * block_size
    slot = jnp.where(valid, block * block_size + positions % block_size, num_slots)
    entries = jnp.stack([k, v], axis=2).reshape(num_tokens, combined, head_dim).astype(kv_cache.dtype)
    flat = kv_cache.reshape(num_slots, combined, head_dim)
    return flat.at[slot].set(entries, mode="drop", unique_indices=False).reshape(kv_cache.shape)
