from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxis.kernels import native
from jaxis.kernels.batch import Batch
from jaxis.kernels.native_constants import ATTENTION_TILE

CACHE_DTYPES = (jnp.float32, jnp.bfloat16, jnp.int8)


def supports(head_dim: int, dtype: DTypeLike) -> bool:
    """Returns whether the kernel takes a cache of keys of this size and type. Its layout is that of other platforms."""
    return native.usable() and head_dim % ATTENTION_TILE == 0 and dtype in CACHE_DTYPES


def select_tokens(
    q: jax.Array,
    weights: jax.Array,
    keys: jax.Array,
    key_cache: jax.Array,
    batch: Batch,
    *,
    num_selected: int,
    always: tuple[int, int],
) -> tuple[jax.Array, jax.Array]:
    key_cache, selected = native.call(
        "index_selection",
        (
            jax.ShapeDtypeStruct(key_cache.shape, key_cache.dtype),
            jax.ShapeDtypeStruct((q.shape[0], num_selected), jnp.int32),
        ),
        q.astype(jnp.float32),
        weights.astype(jnp.float32),
        keys.astype(jnp.float32),
        key_cache,
        *batch.of_requests,
        aliases={3: 0},
        num_first=np.int64(always[0]),
        num_last=np.int64(always[1]),
    )
    return key_cache, selected


def best_groups(
    q: jax.Array,
    weights: jax.Array,
    key_cache: jax.Array,
    batch: Batch,
    *,
    num_groups: int,
    group_size: int,
    delay: int,
) -> jax.Array:
    return native.call(
        "group_selection",
        jax.ShapeDtypeStruct((q.shape[0], num_groups), jnp.int32),
        q.astype(jnp.float32),
        weights.astype(jnp.float32),
        key_cache,
        *batch.of_requests,
        group_size=np.int64(group_size),
        delay=np.int64(delay),
    )


def select_blocks(
    q: jax.Array,
    keys: jax.Array,
    key_cache: jax.Array,
    batch: Batch,
    *,
    num_blocks: int,
    group_size: int,
) -> tuple[jax.Array, jax.Array]:
    key_cache, selected = native.call(
        "block_selection",
        (
            jax.ShapeDtypeStruct(key_cache.shape, key_cache.dtype),
            jax.ShapeDtypeStruct((*q.shape[:2], num_blocks), jnp.int32),
        ),
        q.astype(jnp.float32),
        keys.astype(jnp.float32),
        key_cache,
        *batch.of_requests,
        aliases={2: 0},
        group_size=np.int64(group_size),
    )
    return key_cache, selected
