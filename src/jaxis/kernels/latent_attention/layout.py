"""Layout of the paged cache of latent attention, and of a device's part of it.

A token's entry is D elements that all heads share: its compressed latent, then its rotated rope key. A layer's cache is
`[num_blocks, block_size, 1, D]`; for the native CPU kernel the same bytes are `[num_blocks, 1, block_size * D]`. In an
int8 cache, each entry is followed by two float32 scales (eight bytes), one for the latent and one for the rope key,
whose magnitudes are unrelated: D + 8 elements. On TPU, entries are padded to whole rows of 128 lanes: XLA would copy
other caches in every step.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxis.kernels.batch import Batch
from jaxis.kernels.paged_cache import CacheLayout
from jaxis.kernels.platform import target_platform
from jaxis.kernels.ragged_paged_attention import layout as kv_layout
from jaxis.kernels.ragged_paged_attention.layout import SCALE_BYTES
from jaxis.kernels.ragged_paged_attention.tpu_layout import whole_lanes


class ContextPart(NamedTuple):
    """The consecutive tokens of every block that one device's cache holds, where devices share each block's tokens.

    Blocks have the same numbers on all devices, and a sequence's tokens are spread evenly whatever blocks it has.

    Attributes:
      block_size: B, tokens of a whole block.
      size: Tokens of each block in this cache.
      first: i32 [], index in its block of the first token that this cache holds.
    """

    block_size: int
    size: int
    first: jax.Array

    def position_of(self, slots: jax.Array) -> jax.Array:
        """Returns the positions in the sequence of tokens in this cache, counted in the order of its blocks."""
        return slots // self.size * self.block_size + self.first + slots % self.size


def entry_size(head_dim: int, dtype: DTypeLike) -> int:
    """Returns the number of elements of the cache's type that store an entry of D = `head_dim` elements."""
    return head_dim + (2 * SCALE_BYTES if dtype == jnp.int8 else 0)


def latent_cache_layout(block_size: int, head_dim: int, dtype: DTypeLike, token_axis: str | None = None) -> CacheLayout:
    """Returns the layout of a layer's cache; devices may share a block's tokens by the logical axis `token_axis`."""
    size = entry_size(head_dim, dtype)
    shape = (block_size, 1, whole_lanes(size) if target_platform() == "tpu" else size)
    return CacheLayout("any", block_size, 1, shape, np.dtype(dtype), (token_axis, None, None))


def encode(entries: jax.Array, dtype: DTypeLike, value_dim: int) -> jax.Array:
    """Encodes entries [..., D] for a cache of this type, as [..., D] or [..., D + 8]."""
    if dtype != jnp.int8:
        return entries.astype(dtype)
    latent, rope_key = (kv_layout.encode(part, dtype) for part in jnp.split(entries, [value_dim], axis=-1))
    numbers = [part[..., :-SCALE_BYTES] for part in (latent, rope_key)]
    return jnp.concatenate([*numbers, *(part[..., -SCALE_BYTES:] for part in (latent, rope_key))], axis=-1)


def decode(cached: jax.Array, value_dim: int, head_dim: int) -> jax.Array:
    """Decodes cached entries, padded [..., D] or [..., D + 8], to [..., D]; int8 becomes float32."""
    cached = cached[..., : entry_size(head_dim, cached.dtype)]
    if cached.dtype != jnp.int8:
        return cached
    latent, rope_key, *scales = jnp.split(cached, [value_dim, head_dim, head_dim + SCALE_BYTES], axis=-1)
    parts = zip((latent, rope_key), scales, strict=True)
    return jnp.concatenate([kv_layout.decode(jnp.concatenate(part, axis=-1)) for part in parts], axis=-1)


def write_latent_cache(
    kv_cache: jax.Array,
    entries: jax.Array,
    value_dim: int,
    batch: Batch,
    part: ContextPart | None = None,
) -> jax.Array:
    """Writes this step's entries [T, D] at their positions; padding and tokens outside `part` write nothing."""
    num_blocks, num_slots, _, size = kv_cache.shape
    block_size = num_slots if part is None else part.block_size
    block, slot = batch.places(block_size, num_blocks)
    if part is not None:
        slot -= part.first
        block = jnp.where((slot >= 0) & (slot < part.size), block, num_blocks)
        slot = jnp.clip(slot, 0)
    flat = kv_cache.reshape(num_blocks * num_slots, size)
    encoded = encode(entries, kv_cache.dtype, value_dim)
    encoded = jnp.pad(encoded, ((0, 0), (0, size - encoded.shape[1])))
    return flat.at[block * num_slots + slot].set(encoded, mode="drop").reshape(kv_cache.shape)
