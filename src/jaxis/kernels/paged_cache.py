"""A layer's paged cache: its array, and the layout of that array, which decides which kernels read it."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxis.kernels import native


@dataclass(frozen=True)
class CacheLayout:
    """How a layer's cache lies in memory, as it is planned for the devices of a mesh.

    Attributes:
      kernels: Whose layout it is: of the native CPU kernels, of TPUs, or of what runs on any platform.
      block_size: B, tokens per block.
      num_heads: K of the heads that are cached; 1 for an entry that all heads share.
      shape: Shape of a block. The cache is an array [num_blocks, *shape].
      dtype: Type of the array.
      axes: The logical name of each axis of a block; None for one that is not split over devices.
    """

    kernels: Literal["native", "tpu", "any"]
    block_size: int
    num_heads: int
    shape: tuple[int, ...]
    dtype: np.dtype
    axes: tuple[str | None, ...]

    @property
    def head_axis(self) -> int | None:
        """The axis of the cache along which devices may share its heads; None if each device has all of them."""
        return 1 + self.axes.index("kv_heads") if "kv_heads" in self.axes else None

    @property
    def block_bytes(self) -> int:
        """Bytes of a block over all devices that share it."""
        return math.prod(self.shape) * self.dtype.itemsize

    def cache(self, array: Any) -> PagedCache:
        """The cache [num_blocks, *shape] with this layout."""
        return PagedCache(array, self)


@jax.tree_util.register_dataclass
@dataclass(slots=True)
class PagedCache:
    """A layer's cache, as models pass it to attention: a pytree of one array.

    Not to be changed. It is not frozen because each step makes one for every layer, and frozen ones take twice as long.

    Attributes:
      array: [num_blocks, *layout.shape].
      layout: Of the array. Inside `shard_map`, the array is a device's part of the one that is described here.
    """

    array: jax.Array
    layout: CacheLayout = field(metadata={"static": True})


def make_cache_array(struct: jax.ShapeDtypeStruct, *, reads_only_written: bool) -> jax.Array:
    """An array of a cache or of a state; its initial content is meaningless.

    Args:
      struct: Its shape, type and sharding.
      reads_only_written: Whether only written parts of it are ever read, as by the native kernels. On one CPU device,
        it then takes up memory only as it is written, in huge pages if the system supports them.
    """
    sharding = struct.sharding
    assert sharding is not None
    [device, *others] = sharding.device_set
    if reads_only_written and device.platform == "cpu" and not others and native.library() is not None:
        return _make_empty(struct.shape, struct.dtype, sharding)()
    return jnp.zeros(struct.shape, struct.dtype, device=sharding)


@functools.lru_cache(maxsize=32)
def _make_empty(shape: tuple[int, ...], dtype: np.dtype, sharding: jax.sharding.Sharding) -> Callable[[], jax.Array]:
    """A program that allocates an array: one for all layers whose caches are alike."""
    return jax.jit(lambda: native.call("empty", jax.ShapeDtypeStruct(shape, dtype)), out_shardings=sharding)
