"""Layout of the paged KV cache, for the implementations that share it.

A layer's cache is `[num_blocks, block_size, 2 * K, D]`. Along the third axis each kv head's key precedes its value,
which keeps a head's keys and values on one device when kv heads are sharded. In an int8 cache, each key and value is
followed by the four bytes of its float32 scale: `[num_blocks, block_size, 2 * K, D + 4]`. The native CPU kernel
(`cpu.py`) and TPUs (`tpu_layout.py`) have different layouts.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxis.kernels.batch import Batch
from jaxis.kernels.paged_cache import CacheLayout, from_stored, to_stored

SCALE_BYTES = 4
INT8_MAX = 127


def entry_size(head_dim: int, dtype: DTypeLike) -> int:
    """Returns the number of elements of the cache's type that store a key or value of D = `head_dim` elements."""
    return head_dim + (SCALE_BYTES if dtype == jnp.int8 else 0)


def kv_cache_layout(block_size: int, num_kv_heads: int, head_dim: int, dtype: DTypeLike) -> CacheLayout:
    shape = (block_size, 2 * num_kv_heads, entry_size(head_dim, dtype))
    return CacheLayout("any", block_size, num_kv_heads, shape, np.dtype(dtype), (None, "kv_heads", None))


def encode(x: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Encodes keys or values [..., D] for a cache of this type, as [..., D] or [..., D + 4]."""
    if dtype != jnp.int8:
        return to_stored(x, np.dtype(dtype))
    numbers, scale = quantize(x)
    return jnp.concatenate([numbers, jax.lax.bitcast_convert_type(scale[..., 0], jnp.int8)], axis=-1)


def quantize(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Quantizes keys or values [..., D] to int8 [..., D] and one float32 scale [..., 1]."""
    x = x.astype(jnp.float32)
    scale = jnp.max(jnp.abs(x), axis=-1, keepdims=True) / INT8_MAX
    return jnp.round(x / jnp.where(scale == 0, 1, scale)).astype(jnp.int8), scale


def decode(entries: jax.Array) -> jax.Array:
    """Decodes cache entries, [..., D] or [..., D + 4], to keys or values [..., D]; int8 becomes float32."""
    if entries.dtype != jnp.int8:
        return from_stored(entries)
    numbers, scale = entries[..., :-SCALE_BYTES], entries[..., -SCALE_BYTES:]
    return numbers.astype(jnp.float32) * jax.lax.bitcast_convert_type(scale, jnp.float32)[..., None]


def read_blocks(kv_cache: jax.Array, blocks: jax.Array) -> jax.Array:
    """Returns the entries of blocks [...], [..., block_size, 2 * K, D]; int8 becomes float32."""
    return decode(kv_cache[blocks])


def split_kv(context: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Splits interleaved keys and values [..., 2 * K, D] from the cache into keys and values, each [..., K, D]."""
    *lead, combined, head_dim = context.shape
    pairs = context.reshape(*lead, combined // 2, 2, head_dim)
    return pairs[..., 0, :], pairs[..., 1, :]


def write_kv_cache(kv_cache: jax.Array, k: jax.Array, v: jax.Array, batch: Batch) -> jax.Array:
    """Writes this step's keys and values [T, K, D] at their positions; padding tokens write nothing."""
    num_blocks, block_size, combined, entry_size = kv_cache.shape
    places = batch.places(block_size, num_blocks)
    entries = jnp.stack([encode(k, kv_cache.dtype), encode(v, kv_cache.dtype)], axis=2)
    entries = entries.reshape(-1, combined, entry_size)
    flat = kv_cache.reshape(-1, combined, entry_size)
    slot = places.block * block_size + places.offset
    return flat.at[slot].set(entries, mode="drop", unique_indices=False).reshape(kv_cache.shape)
