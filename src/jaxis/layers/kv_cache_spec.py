"""Specifications of a layer's entries in the paged KV cache."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from jax.typing import DTypeLike

from jaxis.config.attention_span import FULL_CONTEXT, AttentionSpan
from jaxis.errors import ConfigError
from jaxis.kernels.paged_cache import CacheLayout
from jaxis.kernels.ragged_paged_attention import kv_cache_layout
from jaxis.layers.module import ByMember
from jaxis.parallel.equal_shares import check_heads


class CacheSpec(Protocol):
    """Facts about a layer's cache that the engine needs to allocate and share it."""

    @property
    def span(self) -> AttentionSpan:
        """The tokens that the layer reads; blocks without any of them are freed."""
        ...

    def layout(self, block_size: int, dtype: DTypeLike) -> CacheLayout:
        """Returns the layout of the layer's cache in a program traced under the current mesh."""
        ...

    def on_devices(self, tensor_parallel_size: int) -> CacheSpec:
        """Returns the spec of a cache sharded over this many devices. Raises ConfigError if it cannot be sharded so."""
        ...


class HasCache(metaclass=ByMember):
    """A layer that caches something for each token, such as attention."""

    kv_cache_spec: CacheSpec


class SharesCache(metaclass=ByMember):
    """A layer that attends to the cache of an earlier decoder layer instead of one of its own.

    Attributes:
      shares_cache_of: Index of that decoder layer, which has the same span, kv heads and head dimension; None: it has
        its own.
    """

    shares_cache_of: int | None


class HandsOnSelection(metaclass=ByMember):
    """Attention to selected tokens, or entries. Other layers may use its selection, and what it is of.

    Attributes:
      hands_on_selection: True if the layer takes the last selection, and returns one, as the last of its caches.
    """

    hands_on_selection: bool


@dataclass(frozen=True)
class KVCacheSpec:
    """Keys and values of K heads of D elements each.

    Attributes:
      num_kv_heads: K.
      head_dim: D, elements of a key, and of a value in the cache: smaller values are followed by zeros.
      span: The tokens that the layer reads.
      num_heads: H, the query heads that share them; None if they may be any number.
      copies: Number of consecutive copies of each of the model's heads among the K.
      holds_biases: True if keys also hold ALiBi's biases, which an int8 cache, with one scale per key, would round
        away.
    """

    num_kv_heads: int
    head_dim: int
    span: AttentionSpan = FULL_CONTEXT
    num_heads: int | None = None
    copies: int = 1
    holds_biases: bool = False

    def layout(self, block_size: int, dtype: DTypeLike) -> CacheLayout:
        """Returns the layout of the layer's cache. Raises ConfigError if an int8 cache cannot hold the layer's keys."""
        if self.holds_biases and np.dtype(dtype) == np.int8:
            raise ConfigError("an int8 cache cannot hold the keys of a model with ALiBi: leave kv_cache_dtype at auto")
        return kv_cache_layout(block_size, self.num_kv_heads, self.head_dim, dtype)

    def on_devices(self, tensor_parallel_size: int) -> KVCacheSpec:
        """Returns the spec with kv heads repeated if there are fewer heads than devices.

        Raises ConfigError if the devices cannot share the heads equally.
        """
        check_heads(self.num_heads, self.num_kv_heads, tensor_parallel_size)
        num_kv_heads = max(self.num_kv_heads, tensor_parallel_size)
        copies = self.copies * (num_kv_heads // self.num_kv_heads)
        return dataclasses.replace(self, num_kv_heads=num_kv_heads, copies=copies)
