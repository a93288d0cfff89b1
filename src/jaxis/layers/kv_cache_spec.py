"""Specifications of a layer's entries in the paged KV cache."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar, Protocol, runtime_checkable

from jax.typing import DTypeLike

from jaxis.config.attention_span import FULL_CONTEXT, AttentionSpan
from jaxis.kernels.ragged_paged_attention import kv_cache_shape, kv_head_axis
from jaxis.parallel.heads import check_heads


class CacheSpec(Protocol):
    """The facts about a layer's cache that the engine needs to allocate and share it."""

    @property
    def span(self) -> AttentionSpan:
        """Which tokens the layer reads; blocks without any of them are freed."""
        ...

    @property
    def head_axis_name(self) -> str | None:
        """The logical name of the axis of the cache's heads; None if the cache is replicated."""
        ...

    def shape(self, num_blocks: int, block_size: int, dtype: DTypeLike) -> tuple[int, ...]:
        """The shape of the layer's cache in a program traced under the current mesh."""
        ...

    def axes(self, shape: tuple[int, ...], dtype: DTypeLike) -> tuple[str | None, ...]:
        """The logical name of each axis of a cache of this shape; None for one that is not split over devices."""
        ...

    def on_devices(self, tensor_parallel_size: int) -> CacheSpec:
        """The spec of a cache that is sharded over this many devices.

        Raises:
          ConfigError: The cache cannot be sharded over that many devices.
        """
        ...


@runtime_checkable
class HasCache(Protocol):
    """A layer that caches something for each token, such as attention."""

    @property
    def kv_cache_spec(self) -> CacheSpec:
        """The cache that the engine allocates for the layer."""
        ...


@runtime_checkable
class SharesCache(Protocol):
    """A layer that attends to the cache of an earlier decoder layer and has none of its own."""

    @property
    def shares_cache_of(self) -> int:
        """The index of that decoder layer, which has the same span, kv heads and head dimension."""
        ...


@runtime_checkable
class HandsOnSelection(Protocol):
    """Attention to selected tokens, whose selection other layers may use, too."""

    @property
    def hands_on_selection(self) -> bool:
        """Whether the layer takes the last selection, and returns one, as the last of its caches."""
        ...


@dataclass(frozen=True)
class KVCacheSpec:
    """Keys and values of K heads of D elements each.

    Attributes:
      num_kv_heads: K.
      head_dim: D, of keys. Values have as many elements in the cache: smaller ones are followed by zeros.
      span: Which tokens the layer reads.
      num_heads: H, the query heads that share them; None if they may be any number.
      copies: How often each of the model's heads is among the K, one copy after the other.
    """

    head_axis_name: ClassVar[str | None] = "kv_heads"

    num_kv_heads: int
    head_dim: int
    span: AttentionSpan = FULL_CONTEXT
    num_heads: int | None = None
    copies: int = 1

    def shape(self, num_blocks: int, block_size: int, dtype: DTypeLike) -> tuple[int, ...]:
        """The shape of the layer's cache in a program traced under the current mesh."""
        return kv_cache_shape(num_blocks, block_size, self.num_kv_heads, self.head_dim, dtype)

    def axes(self, shape: tuple[int, ...], dtype: DTypeLike) -> tuple[str | None, ...]:
        """The logical name of each axis of a cache of this shape: one is that of the kv heads."""
        head_axis = kv_head_axis(dtype) % len(shape)
        return tuple(self.head_axis_name if axis == head_axis else None for axis in range(len(shape)))

    def on_devices(self, tensor_parallel_size: int) -> KVCacheSpec:
        """The spec with kv heads repeated if there are fewer heads than devices.

        Raises:
          ConfigError: The devices cannot share the heads equally.
        """
        check_heads(self.num_heads, self.num_kv_heads, tensor_parallel_size)
        num_kv_heads = max(self.num_kv_heads, tensor_parallel_size)
        copies = self.copies * (num_kv_heads // self.num_kv_heads)
        return dataclasses.replace(self, num_kv_heads=num_kv_heads, copies=copies)
