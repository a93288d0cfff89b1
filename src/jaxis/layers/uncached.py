from __future__ import annotations

from dataclasses import dataclass
from typing import TypeGuard

import jax

from jaxis.kernels.paged_cache import PagedCache


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class UncachedKeysAndValues:
    """Keys and values, [T, K, D] after norms and rope, in the place of a cache, for later layers that share them.

    The decoder passes an empty one, instead of None, to the layer that makes the keys and values of whole sequences. It
    passes that layer's result to the layers that share them.
    """

    keys: jax.Array | None = None
    values: jax.Array | None = None


KVCache = PagedCache | UncachedKeysAndValues | None
"""A cache that attention takes and returns; without caches, None or an `UncachedKeysAndValues`."""


def is_cache(kv_cache: KVCache) -> TypeGuard[PagedCache]:
    """Returns whether this is a cache; if not, sequences are whole."""
    return kv_cache is not None and not isinstance(kv_cache, UncachedKeysAndValues)
