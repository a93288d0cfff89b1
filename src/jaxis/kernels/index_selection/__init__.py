"""Selection of the context tokens that each token attends to, by an indexer's scores (DeepSeek Sparse Attention).

The score of token s for query t is the sum over heads of `weight[t, h] * max(0, q[t, h] . key[s])`. The tokens with the
best scores are selected. Among equal scores, which the maximum with 0 makes common, earlier tokens come first: a
query's selection is a function of its own context alone. `reference.py` is the definition for whole sequences;
`tiled.py` (any platform) and `cpu.py` select from a cache, with the arguments of `select_tokens`. `groups.py` selects
groups of tokens that share a key; `blocks.py` selects, for each head, blocks of tokens with a key each.
"""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
from jax.typing import DTypeLike

from jaxis.errors import ConfigError
from jaxis.kernels.batch import Batch
from jaxis.kernels.index_selection import cpu, tiled
from jaxis.kernels.index_selection.blocks import select_blocks, select_blocks_of_whole_sequences
from jaxis.kernels.index_selection.groups import (
    best_groups,
    num_selected_tokens,
    select_groups,
    select_groups_of_whole_sequences,
)
from jaxis.kernels.index_selection.reference import select_from_whole_sequences
from jaxis.kernels.paged_cache import CacheLayout, PagedCache, stored_dtype
from jaxis.kernels.ragged_paged_attention import layout

__all__ = [
    "best_groups",
    "group_cache_layout",
    "index_cache_layout",
    "num_selected_tokens",
    "select_blocks",
    "select_blocks_of_whole_sequences",
    "select_from_whole_sequences",
    "select_groups",
    "select_groups_of_whole_sequences",
    "select_tokens",
]


def index_cache_layout(block_size: int, head_dim: int, dtype: DTypeLike) -> CacheLayout:
    """Returns the layout of a layer's cache of keys of D elements: `[num_blocks, block_size, D]`, int8 with D + 4.

    The type is float32, bfloat16, float16, or int8 with a float32 scale per key.
    """
    kernels = "native" if cpu.supports(head_dim, dtype) else "any"
    shape = (block_size, layout.entry_size(head_dim, dtype))
    return CacheLayout(kernels, block_size, 1, shape, np.dtype(dtype), (None, None))


def group_cache_layout(block_size: int, group_size: int, size: int, dtype: DTypeLike) -> CacheLayout:
    """Returns the layout of a cache of a row of `size` elements for each group of tokens, in blocks of tokens.

    The row is in the block of the group's last token; a group may have several blocks, of which the others have no row.
    Raises ConfigError if groups and blocks begin at different tokens.
    """
    if block_size % group_size and group_size % block_size:
        raise ConfigError(
            f"block_size={block_size} is not a multiple of the {group_size} tokens that share a key in this model: use "
            f"{-(-block_size // group_size) * group_size}"
        )
    layout = index_cache_layout(max(1, block_size // group_size), size, dtype)
    return dataclasses.replace(layout, block_size=block_size, dtype=stored_dtype(dtype))


def select_tokens(
    q: jax.Array,
    weights: jax.Array,
    keys: jax.Array,
    key_cache: PagedCache,
    batch: Batch,
    *,
    num_selected: int,
    always: tuple[int, int] = (0, 0),
) -> tuple[PagedCache, jax.Array]:
    """Writes this step's keys into the cache, then selects from it.

    Args:
      q: [T, H, D].
      weights: float32 [T, H].
      keys: [T, D].
      key_cache: Cache with a layout of `index_cache_layout`. It is updated in place if donated.
      batch: The step's tokens and requests.
      num_selected: K, the largest number of tokens that a token attends to.
      always: Numbers of first and of last tokens of a context, at most K together, that are selected in any case.

    Returns:
      The updated cache, and i32 [T, K]: the selected positions, ascending, then -1. Tokens at positions below K select
      all tokens up to themselves; padding selects none.
    """
    chosen = cpu if key_cache.layout.kernels == "native" else tiled
    array, selected = chosen.select_tokens(
        q, weights, keys, key_cache.array, batch, num_selected=num_selected, always=always
    )
    return key_cache.layout.cache(array), selected
