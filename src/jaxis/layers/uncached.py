"""What stands in the place of a cache where whole sequences run without one and layers share keys and values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeGuard

import jax

from jaxis.kernels.paged_cache import PagedCache


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class UncachedKeysAndValues:
    """Keys and values of whole sequences that later layers attend to, too.

    The decoder passes an empty one to the layer that makes them, instead of None, and what that returns to the layers
    that share them.

    Attributes:
      keys: [T, K, D], after norms and rope; None before they are made.
      values: [T, K, D] or None.
    """

    keys: jax.Array | None = None
    values: jax.Array | None = None


KVCache = PagedCache | UncachedKeysAndValues | None
"""What attention gets and returns: a cache, or without caches None or what stands in its place."""


def is_cache(kv_cache: KVCache) -> TypeGuard[PagedCache]:
    """Whether this is a cache: if not, sequences are whole."""
    return kv_cache is not None and not isinstance(kv_cache, UncachedKeysAndValues)
