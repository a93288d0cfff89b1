"""Latent attention with a cache whose tokens are divided between devices (decode-context parallelism).

All heads share an entry, so dividing heads would leave the whole cache on every device. Here each device has some
tokens of every block. It attends to them with the queries of all heads. The devices' sums, each relative to its own
largest score, are then combined as an online softmax combines its chunks (arXiv:2205.14135).
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from jaxis.kernels.batch import Batch
from jaxis.kernels.latent_attention import blockwise, layout
from jaxis.kernels.latent_attention.layout import ContextPart
from jaxis.kernels.paged_cache import PagedCache
from jaxis.parallel.mesh import MODEL_AXIS, devices_of_layer, on_each_device


def latent_attention(
    q: jax.Array,
    entries: jax.Array,
    kv_cache: PagedCache,
    batch: Batch,
    *,
    value_dim: int,
    scale: float,
) -> tuple[PagedCache, jax.Array]:
    """Runs `jaxis.kernels.latent_attention.latent_attention` over the devices of the current mesh's model axis.

    The cache has the layout of `layout.py`. Its second axis, a block's tokens, is divided between the devices, and the
    heads of q may be.
    """
    cache_spec = PartitionSpec(None, MODEL_AXIS)
    is_split = q.shape[1] % devices_of_layer() == 0
    heads = PartitionSpec(None, MODEL_AXIS) if is_split else PartitionSpec()
    kernel = functools.partial(
        _on_device, block_size=kv_cache.layout.block_size, value_dim=value_dim, scale=scale, heads_are_split=is_split
    )
    everywhere = PartitionSpec()
    in_specs = (heads, everywhere, cache_spec, everywhere)
    array, out = on_each_device(kernel, in_specs, (cache_spec, heads))(q, entries, kv_cache.array, batch)
    return kv_cache.layout.cache(array), out


def _on_device(
    q: jax.Array,
    entries: jax.Array,
    kv_cache: jax.Array,
    batch: Batch,
    *,
    block_size: int,
    value_dim: int,
    scale: float,
    heads_are_split: bool,
) -> tuple[jax.Array, jax.Array]:
    """Returns one device's updated part of the cache, and the outputs of its heads."""
    size, num_heads, dtype = kv_cache.shape[1], q.shape[1], q.dtype
    part = ContextPart(block_size, size, lax.axis_index(MODEL_AXIS) * size)
    kv_cache = layout.write_latent_cache(kv_cache, entries, value_dim, batch, part)
    if heads_are_split:
        q = lax.all_gather(q, MODEL_AXIS, axis=1, tiled=True)
    sums = blockwise.latent_attention(q, kv_cache, batch, value_dim=value_dim, scale=scale, part=part)
    values, peak, total = jnp.split(sums, [value_dim, value_dim + 1], axis=-1)
    highest = lax.pmax(peak, MODEL_AXIS)
    # Where no device saw anything (padding), all peaks are -inf, and -inf - -inf would be NaN.
    share = jnp.exp(peak - jnp.where(jnp.isfinite(highest), highest, 0.0))
    # Not psum_scatter, which fails between processes on CPU if one is late. XLA makes one of sum and slice elsewhere.
    values, total = lax.psum((values * share, total * share), MODEL_AXIS)
    out = values / jnp.maximum(total, jnp.finfo(jnp.float32).tiny)
    if heads_are_split:
        out = lax.dynamic_slice_in_dim(out, lax.axis_index(MODEL_AXIS) * num_heads, num_heads, axis=1)
    return kv_cache, out.astype(dtype)
