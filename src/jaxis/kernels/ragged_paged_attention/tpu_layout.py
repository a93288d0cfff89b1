"""Layout of paged caches on TPU: whole rows of 128 lanes, which XLA reads and writes where they are.

Caches with other rows XLA would copy in every step. A layer's cache is `[num_blocks, B + S, R, W]`, where W is a
multiple of 128, and each of a block's B tokens has R rows:

- D <= 64: one for each kv head, with the key from lane 0 on and the value from lane 64 on;
- D > 64: for each kv head its key, then its value, both padded;
- latent attention: one, with the latent and then the rope key, padded.

In an int8 cache, S more slots of a block hold the bytes of the float32 scales [B, P] of each row's tokens: P is 2 for
rows of a key and a value or of a latent and a rope key, else 1. In other caches, S is 0.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxis.kernels.batch import CachePlaces
from jaxis.kernels.paged_cache import CacheLayout
from jaxis.kernels.ragged_paged_attention.layout import SCALE_BYTES, quantize

LANES = 128


def padded_size(head_dim: int) -> int:
    """Returns the lanes of a key or value of D = `head_dim` elements."""
    return LANES // 2 if 2 * head_dim <= LANES else whole_lanes(head_dim)


def whole_lanes(size: int) -> int:
    return -(-size // LANES) * LANES


def kv_cache_layout(block_size: int, num_kv_heads: int, head_dim: int, dtype: DTypeLike) -> CacheLayout:
    size = padded_size(head_dim)
    parts = max(1, LANES // size)
    rows = (2 * num_kv_heads // parts, size * parts)
    return row_layout(block_size, num_kv_heads, rows, parts, dtype, "kv_heads")


def row_layout(
    block_size: int, num_heads: int, rows: tuple[int, int], parts: int, dtype: DTypeLike, row_axis: str | None
) -> CacheLayout:
    """Returns the layout of a cache with rows (R, W) of P = `parts` parts each; `row_axis` is the logical name of R."""
    scale_slots = -(-block_size * parts * SCALE_BYTES // rows[1]) if dtype == jnp.int8 else 0
    shape = (block_size + scale_slots, *rows)
    return CacheLayout("tpu", block_size, num_heads, shape, np.dtype(dtype), (None, row_axis, None))


def write_heads(kv_cache: jax.Array, k: jax.Array, v: jax.Array, places: CachePlaces, block_size: int) -> jax.Array:
    """Writes keys and values [T, K, D] of T tokens at their places."""
    num_tokens, _, head_dim = k.shape
    numbers, scales = jnp.stack([k, v], axis=2), None
    if kv_cache.dtype == jnp.int8:
        numbers, scales = quantize(numbers)
        scales = scales.reshape(num_tokens, kv_cache.shape[2], -1)
    numbers = jnp.pad(numbers, [(0, 0)] * 3 + [(0, padded_size(head_dim) - head_dim)])
    return write_rows(kv_cache, numbers.reshape(num_tokens, *kv_cache.shape[2:]), scales, places, block_size)


def write_rows(
    kv_cache: jax.Array, rows: jax.Array, scales: jax.Array | None, places: CachePlaces, block_size: int
) -> jax.Array:
    """Writes rows [T, R, W] and, in an int8 cache, their scales [T, R, P] at their places."""
    kv_cache = kv_cache.at[places.block, places.offset].set(rows.astype(kv_cache.dtype), mode="drop")
    if scales is None:
        return kv_cache
    return _write_scales(kv_cache, scales, places, block_size)


def _write_scales(kv_cache: jax.Array, scales: jax.Array, places: CachePlaces, block_size: int) -> jax.Array:
    """Writes whole slots, with the scales of all of a block's new tokens: to write parts, XLA would copy the cache."""
    num_tokens, num_rows, parts = scales.shape
    num_blocks, num_slots, _, width = kv_cache.shape
    in_block = jnp.arange(block_size)
    # Tokens of a block are neighbours.
    row = jnp.arange(num_tokens)[:, None] + in_block - places.offset[:, None]
    token = jnp.clip(row, 0, num_tokens - 1)
    is_new = (token == row) & (places.block[token] == places.block[:, None]) & (places.offset[token] == in_block)

    def to_slots(of_block: jax.Array) -> jax.Array:
        """Arranges bytes [T, B, R, 4 * P] as slots [T, S, R, W]."""
        lanes = of_block.swapaxes(1, 2).reshape(num_tokens, of_block.shape[2], -1)
        lanes = jnp.pad(lanes, ((0, 0), (0, 0), (0, (num_slots - block_size) * width - lanes.shape[2])))
        return lanes.reshape(num_tokens, of_block.shape[2], -1, width).swapaxes(1, 2)

    scale_bytes = jax.lax.bitcast_convert_type(scales, jnp.int8).reshape(num_tokens, num_rows, -1)
    mask = jnp.broadcast_to(is_new[..., None, None], (num_tokens, block_size, 1, parts * SCALE_BYTES))
    old = kv_cache[jnp.minimum(places.block, num_blocks - 1), block_size:]
    slots = jnp.where(to_slots(mask), to_slots(scale_bytes[token]), old)
    return kv_cache.at[places.block, block_size:].set(slots, mode="drop")


def read_heads(
    kv_cache: jax.Array, blocks: jax.Array, *, head_dim: int, block_size: int, dtype: DTypeLike
) -> jax.Array:
    """Returns the entries of blocks [...], [..., B, 2 * K, padded D]; those of an int8 cache in floats of `dtype`."""
    rows, scales = read_rows(kv_cache, blocks, block_size, max(1, LANES // padded_size(head_dim)))
    entries = rows.reshape(*rows.shape[:-2], -1, padded_size(head_dim))
    if scales is None:
        return entries
    return (entries.astype(jnp.float32) * scales.reshape(*entries.shape[:-1], 1)).astype(dtype)


def read_rows(
    kv_cache: jax.Array, blocks: jax.Array, block_size: int, parts: int
) -> tuple[jax.Array, jax.Array | None]:
    """Returns the rows of blocks [...], [..., B, R, W], and those of an int8 cache with their scales [..., B, R, P]."""
    slots = kv_cache[blocks]
    rows, scale_slots = slots[..., :block_size, :, :], slots[..., block_size:, :, :]
    if kv_cache.dtype != jnp.int8:
        return rows, None
    of_row = scale_slots.swapaxes(-3, -2)
    scale_bytes = of_row.reshape(*of_row.shape[:-2], -1, SCALE_BYTES)
    scales = jax.lax.bitcast_convert_type(scale_bytes, jnp.float32)[..., : block_size * parts]
    return rows, scales.reshape(*scales.shape[:-1], block_size, parts).swapaxes(-3, -2)
