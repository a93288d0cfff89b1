from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxis.kernels import native


@dataclass(frozen=True)
class CacheLayout:
    """Layout of a layer's cache in memory, planned for the devices of a mesh; it decides which kernels read the cache.

    Attributes:
      kernels: Kernels that read this layout: native CPU kernels, TPU kernels, or the code for any platform.
      block_size: B, tokens per block.
      num_heads: K of the cached heads; 1 for an entry that all heads share.
      shape: Shape of a block. The cache is an array [num_blocks, *shape].
      dtype: Type of the array.
      axes: Logical name of each axis of a block; None for an axis that is not split over devices.
    """

    kernels: Literal["native", "tpu", "any"]
    block_size: int
    num_heads: int
    shape: tuple[int, ...]
    dtype: np.dtype
    axes: tuple[str | None, ...]

    @property
    def head_axis(self) -> int | None:
        """Axis of the cache along which devices may share its heads; None if each device has all heads."""
        return 1 + self.axes.index("kv_heads") if "kv_heads" in self.axes else None

    @property
    def block_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def cache(self, array: Any) -> PagedCache:
        return PagedCache(array, self)


@jax.tree_util.register_dataclass
@dataclass(slots=True)
class PagedCache:
    """A layer's cache in the form that models pass to attention: a pytree of one array [num_blocks, *layout.shape].

    Inside `shard_map`, the array is one device's part. Treat the cache as immutable. It is not frozen because each step
    makes one for every layer, and frozen dataclasses take twice as long.
    """

    array: jax.Array
    layout: CacheLayout = field(metadata={"static": True})


def stored_dtype(dtype: DTypeLike) -> np.dtype:
    """Returns the type of the array of a cache that plain JAX reads and writes: uint16 for the bits of bfloat16.

    To index bfloat16, XLA for CPUs converts the whole array to float32, and back after a write.
    """
    return np.dtype(np.uint16 if dtype == jnp.bfloat16 else dtype)


def to_stored(x: jax.Array, dtype: np.dtype) -> jax.Array:
    """Returns floats x as a cache of the type `dtype`, of `stored_dtype`, has them."""
    if dtype != np.uint16:
        return x.astype(dtype)
    return jax.lax.bitcast_convert_type(x.astype(jnp.bfloat16), jnp.uint16)


def from_stored(x: jax.Array) -> jax.Array:
    """Returns entries of a cache of `stored_dtype` in its own type."""
    return jax.lax.bitcast_convert_type(x, jnp.bfloat16) if x.dtype == np.uint16 else x


def make_cache_array(struct: jax.ShapeDtypeStruct, *, reads_only_written: bool) -> jax.Array:
    """Returns an array of a cache or of a state, whose initial content is meaningless.

    If only written parts are ever read, as by the native kernels, an array on one CPU device takes up memory only as it
    is written, in huge pages if the system supports them.
    """
    sharding = struct.sharding
    assert sharding is not None
    [device, *others] = sharding.device_set
    if reads_only_written and device.platform == "cpu" and not others and native.library() is not None:
        return _make_empty(struct.shape, struct.dtype, sharding)()
    return jnp.zeros(struct.shape, struct.dtype, device=sharding)


@functools.lru_cache(maxsize=32)
def _make_empty(shape: tuple[int, ...], dtype: np.dtype, sharding: jax.sharding.Sharding) -> Callable[[], jax.Array]:
    return jax.jit(lambda: native.call("empty", jax.ShapeDtypeStruct(shape, dtype)), out_shardings=sharding)
