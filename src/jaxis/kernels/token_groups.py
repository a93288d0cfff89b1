"""Rows that are computed from groups of consecutive tokens, one for each group, when its last token comes.

Group g of a sequence has the tokens from g * G on. Its row is a function of the rows of the last W tokens up to its
last one: of its own tokens, and of W - G before them if W is larger. The rows of tokens are cached, too, since a
group's tokens may come in several steps. Groups are combined in tiles of a fixed number, padded: a group's bits do not
depend on the step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from jaxis.kernels.batch import Batch
from jaxis.kernels.paged_cache import CacheLayout, PagedCache, from_stored, stored_dtype, to_stored
from jaxis.kernels.ragged_paged_attention.layout import decode, encode

Combine = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
"""Maps float32 [N, W, D], the rows of the last W tokens up to the end of each of N groups, to the groups' rows [N, E].

Takes also bool [N, W], False for rows before the sequence, which are zeros, and i32 [N], the position of each group's
first token. A sum over W needs an order of its own: see `ordered_sum`. Some groups are padding.
"""

TILE_GROUPS = 8


class ClosedGroups(NamedTuple):
    """The groups whose last tokens are in a step, in the order of the flat batch; later entries are padding.

    Attributes:
      request: i32 [C].
      group: i32 [C], the number of the group in its sequence.
      row: i32 [C], the row of the group's last token in the flat batch.
      count: i32 [], the number of groups that are not padding.
    """

    request: jax.Array
    group: jax.Array
    row: jax.Array
    count: jax.Array

    @property
    def valid(self) -> jax.Array:
        """Returns bool [C]."""
        return jnp.arange(self.group.shape[0]) < self.count

    @classmethod
    def of(
        cls,
        batch: Batch,
        group_size: int,
    ) -> ClosedGroups:
        """Returns the groups that a step closes. C is a multiple of `TILE_GROUPS`."""
        seq_lens, num_tokens = batch.seq_lens, len(batch.positions)
        most = min(num_tokens, num_tokens // group_size + seq_lens.shape[0])
        size = -(-most // TILE_GROUPS) * TILE_GROUPS
        lengths = batch.query_lens
        begins = seq_lens - lengths
        before = begins // group_size
        counts = jnp.where(lengths > 0, seq_lens // group_size - before, 0)
        ends = jnp.cumsum(counts)
        index = jnp.arange(size, dtype=jnp.int32)
        request = jnp.searchsorted(ends, index, side="right", method="compare_all").astype(jnp.int32)
        request = jnp.minimum(request, seq_lens.shape[0] - 1)
        group = before[request] + index - (ends - counts)[request]
        row = batch.query_start_loc[request] + (group + 1) * group_size - 1 - begins[request]
        return cls(request, group, row, ends[-1])


def row_cache_layout(block_size: int, size: int, dtype: DTypeLike) -> CacheLayout:
    """Returns the layout of a cache of tokens' rows of `size` elements; beside int8 caches they are float32."""
    own = stored_dtype(jnp.float32 if dtype == jnp.int8 else dtype)
    return CacheLayout("any", block_size, 1, (block_size, size), own, (None, None))


def write_rows(rows: jax.Array, row_cache: PagedCache, batch: Batch) -> PagedCache:
    """Writes rows [T, D] of a step's tokens into a cache of `row_cache_layout`; padding writes nothing."""
    array = row_cache.array
    places = batch.places(array.shape[1], array.shape[0])
    written = array.at[places.block, places.offset].set(to_stored(rows, array.dtype), mode="drop")
    return row_cache.layout.cache(written)


def combine_cached(
    combine: Combine,
    row_cache: PagedCache,
    block_tables: jax.Array,
    closed: ClosedGroups,
    *,
    group_size: int,
    window: int,
) -> jax.Array:
    """Returns the rows [C, E] of closed groups, from tokens' rows in a cache that has those of this step, too.

    `block_tables` i32 [R, max_blocks] are those of the cache of rows; padding's rows are meaningless.
    """

    def one_tile(i: jax.Array) -> jax.Array:
        request, group = (
            lax.dynamic_slice_in_dim(x, i * TILE_GROUPS, TILE_GROUPS) for x in (closed.request, closed.group)
        )
        is_group = i * TILE_GROUPS + jnp.arange(TILE_GROUPS) < closed.count
        return _combine(
            combine,
            lambda position, _: read_rows(row_cache, block_tables[request], position),
            group,
            is_group,
            group_size,
            window,
        )

    struct = jax.eval_shape(one_tile, jnp.int32(0))

    def body(i: jax.Array, out: jax.Array) -> jax.Array:
        return lax.dynamic_update_slice_in_dim(out, one_tile(i), i * TILE_GROUPS, axis=0)

    num_tiles = (closed.count + TILE_GROUPS - 1) // TILE_GROUPS
    out = jnp.zeros((closed.group.shape[0], *struct.shape[1:]), struct.dtype)
    return lax.fori_loop(0, num_tiles, body, out)


def read_rows(row_cache: PagedCache, block_tables: jax.Array, positions: jax.Array) -> jax.Array:
    """Returns float32 rows [N, W, D] of positions [N, W], each of its own table [N, max_blocks]."""
    array = row_cache.array
    block = jnp.take_along_axis(block_tables, positions // array.shape[1], axis=1)
    return from_stored(array[block, positions % array.shape[1]]).astype(jnp.float32)


def read_groups(group_cache: PagedCache, block_tables: jax.Array, groups: jax.Array, *, group_size: int) -> jax.Array:
    """Returns float32 rows [N, W, E] of closed groups [N, W], each of its own table [N, max_blocks]."""
    array = group_cache.array
    index = ((groups + 1) * group_size - 1) // group_cache.layout.block_size
    block = jnp.take_along_axis(block_tables, index, axis=1)
    return decode(array[block, groups % array.shape[1]]).astype(jnp.float32)


def combine_whole_sequences(
    combine: Combine, rows: jax.Array, closed: ClosedGroups, *, group_size: int, window: int
) -> jax.Array:
    """Returns the rows [C, E] of the groups of whole sequences, from the rows [T, D] of their tokens.

    All are combined at once: no loop keeps derivatives from it, and `combine` is called with values.
    """

    def read(_: jax.Array, back: jax.Array) -> jax.Array:
        return rows[jnp.maximum(closed.row[:, None] + back, 0)].astype(jnp.float32)

    return _combine(combine, read, closed.group, closed.valid, group_size, window)


def _combine(
    combine: Combine,
    read: Callable[[jax.Array, jax.Array], jax.Array],
    group: jax.Array,
    is_group: jax.Array,
    group_size: int,
    window: int,
) -> jax.Array:
    """Takes `read`, which maps positions [N, W] of groups [N], and the tokens [W] from their last one on, to rows.

    The rows [N, W, D] of tokens before a sequence, and of entries that are no group, may be any.
    """
    back = jnp.arange(1 - window, 1, dtype=jnp.int32)
    position = ((group + 1) * group_size - 1)[:, None] + back
    exists = (position >= 0) & is_group[:, None]
    # What no token of the sequence has written may be garbage: a NaN there must not spread.
    found = jnp.where(exists[..., None], read(jnp.where(exists, position, 0), back), 0)
    return combine(found, exists, jnp.where(is_group, group * group_size, 0))


def write_groups(
    values: jax.Array, group_cache: PagedCache, block_tables: jax.Array, closed: ClosedGroups, *, group_size: int
) -> PagedCache:
    """Writes the rows [C, E] of closed groups into a cache [num_blocks, groups of a block, E], or E + 4 in int8."""
    array = group_cache.array
    index = ((closed.group + 1) * group_size - 1) // group_cache.layout.block_size
    index = jnp.minimum(index, block_tables.shape[1] - 1)
    block = jnp.where(closed.valid, block_tables[closed.request, index], array.shape[0])
    written = array.at[block, closed.group % array.shape[1]].set(encode(values, array.dtype), mode="drop")
    return group_cache.layout.cache(written)


def ordered_sum(terms: jax.Array) -> jax.Array:
    """Returns the sum [N, D] of terms [N, W, D], added from the first to the last."""
    unroll = min(terms.shape[1], 16)
    return lax.fori_loop(1, terms.shape[1], lambda i, total: total + terms[:, i], terms[:, 0], unroll=unroll)


def ordered_softmax_sum(logits: jax.Array, values: jax.Array) -> jax.Array:
    """Returns the sum [N, D] over W of values [N, W, D], weighted by the softmax over W of logits [N, W, D]."""
    weights = jnp.exp(logits - jnp.max(logits, axis=1, keepdims=True))
    return ordered_sum(weights * values) / ordered_sum(weights)
