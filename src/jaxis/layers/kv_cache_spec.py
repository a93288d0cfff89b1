"""What a layer needs of the caches: keys and values of each token, or a state of each sequence."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from jax.typing import DTypeLike

from jaxis.config.attention_span import FULL_CONTEXT, AttentionSpan
from jaxis.errors import ConfigError
from jaxis.kernels.paged_cache import CacheLayout
from jaxis.kernels.ragged_paged_attention import kv_cache_layout
from jaxis.parallel.mesh import check_heads

# Specifications of a layer's entries in the paged KV cache.


class CacheSpec(Protocol):
    """The facts about a layer's cache that the engine needs to allocate and share it."""

    @property
    def span(self) -> AttentionSpan:
        """Which tokens the layer reads; blocks without any of them are freed."""
        ...

    def layout(self, block_size: int, dtype: DTypeLike) -> CacheLayout:
        """The layout of the layer's cache in a program traced under the current mesh."""
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
      holds_biases: Whether keys hold biases beside what they are compared by, whose bits one scale for all would lose.
    """

    num_kv_heads: int
    head_dim: int
    span: AttentionSpan = FULL_CONTEXT
    num_heads: int | None = None
    copies: int = 1
    holds_biases: bool = False

    def layout(self, block_size: int, dtype: DTypeLike) -> CacheLayout:
        """The layout of the layer's cache in a program traced under the current mesh.

        Raises:
          ConfigError: An int8 cache cannot hold the layer's keys.
        """
        if self.holds_biases and np.dtype(dtype) == np.int8:
            raise ConfigError("an int8 cache cannot hold the keys of a model with ALiBi: leave kv_cache_dtype at auto")
        return kv_cache_layout(block_size, self.num_kv_heads, self.head_dim, dtype)

    def on_devices(self, tensor_parallel_size: int) -> KVCacheSpec:
        """The spec with kv heads repeated if there are fewer heads than devices.

        Raises:
          ConfigError: The devices cannot share the heads equally.
        """
        check_heads(self.num_heads, self.num_kv_heads, tensor_parallel_size)
        num_kv_heads = max(self.num_kv_heads, tensor_parallel_size)
        copies = self.copies * (num_kv_heads // self.num_kv_heads)
        return dataclasses.replace(self, num_kv_heads=num_kv_heads, copies=copies)


# Specifications of a layer's recurrent state: a fixed number of bytes for each sequence, however long it is.


@dataclass(frozen=True)
class StateArray:
    """One array of a layer's state, [num_slots, *shape].

    Attributes:
      shape: Of a sequence's part.
      axes: The logical name of each axis of `shape`; None for one that is not split over devices.
      dtype: None is the type of the activations.
    """

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    dtype: DTypeLike | None = None

    def dtype_in(self, activations: DTypeLike) -> np.dtype:
        """Its type in a model with activations of this type."""
        return np.dtype(activations if self.dtype is None else self.dtype)


@dataclass(frozen=True)
class StateCacheSpec:
    """The arrays of a layer's state. The layer gets them, and returns them, as a tuple in this order."""

    arrays: tuple[StateArray, ...]

    def __iter__(self) -> Iterator[StateArray]:
        return iter(self.arrays)

    def slot_bytes(self, activations: DTypeLike) -> int:
        """Bytes of one sequence's state, with activations of this type."""
        return sum(math.prod(array.shape) * array.dtype_in(activations).itemsize for array in self)


@runtime_checkable
class HasState(Protocol):
    """A layer that keeps a state for each sequence."""

    @property
    def state_cache_spec(self) -> StateCacheSpec:
        """The state that the engine allocates for the layer."""
        ...
