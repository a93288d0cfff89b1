"""Attention of H heads to entries that are keys and values at once: those of a window, and those of closed groups.

A token attends to the entries of the last W tokens up to itself, and to those of closed groups of tokens: of all, or of
selected ones. Each head has a sink, a logit without a value. Entries are read from caches in tiles of a fixed number,
for one query after the other, with a running softmax: the bits of a token do not depend on the step, and the work
follows the entries that it attends to.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxis.kernels.batch import Batch
from jaxis.kernels.paged_cache import PagedCache
from jaxis.kernels.platform import target_platform
from jaxis.kernels.ragged_paged_attention.context_chunks import OnlineSoftmax, product
from jaxis.kernels.token_groups import read_groups, read_rows

TILE_ENTRIES = 128
_PARALLEL_QUERIES = 8  # on accelerators
Reader = Callable[[jax.Array], jax.Array]


class GroupEntries(NamedTuple):
    """The cached entries of closed groups.

    Attributes:
      cache: Entries of groups of `group_size` tokens.
      block_tables: i32 [R, max_blocks].
      selection: i32 [T, K], the numbers of the groups that a token attends to, then -1; None: all that are closed.
    """

    cache: PagedCache
    group_size: int
    block_tables: jax.Array
    selection: jax.Array | None


def compressed_attention(
    q: jax.Array,
    sinks: jax.Array,
    window_cache: PagedCache,
    groups: GroupEntries | None,
    batch: Batch,
    *,
    window: int,
    scale: float,
) -> jax.Array:
    """Returns [T, H, D] for q [T, H, D] and sinks float32 [H]; zeros for padding.

    The caches have this step's entries, too. The batch has the tables of the cache of the window.
    """
    num_tokens = q.shape[0]
    request, _ = batch.request_of_token()

    def one_query(t: jax.Array) -> jax.Array:
        query, position, own = q[t].astype(jnp.float32) * scale, batch.positions[t], request[t][None]
        first = jnp.maximum(position - window + 1, 0)

        def of_window(index: jax.Array) -> jax.Array:
            return read_rows(window_cache, batch.block_tables[own], jnp.minimum(first + index, position)[None])[0]

        carry = _attend(query, of_window, position - first + 1, OnlineSoftmax.empty(query.shape[:1], query.shape[1]))
        if groups is not None:
            carry = _attend(query, *_group_reader(groups, t, position, own), carry)
        return carry.output(sinks).astype(q.dtype)

    at_once = 1 if target_platform() == "cpu" else _PARALLEL_QUERIES
    out = jnp.zeros((-(-num_tokens // at_once) * at_once, *q.shape[1:]), q.dtype)

    def body(i: jax.Array, out: jax.Array) -> jax.Array:
        tile = jax.vmap(one_query)(jnp.minimum(i * at_once + jnp.arange(at_once), num_tokens - 1))
        return lax.dynamic_update_slice_in_dim(out, tile, i * at_once, axis=0)

    return lax.fori_loop(0, (batch.num_tokens + at_once - 1) // at_once, body, out)[:num_tokens]


def _group_reader(groups: GroupEntries, t: jax.Array, position: jax.Array, own: jax.Array) -> tuple[Reader, jax.Array]:
    """Returns a reader of the entries of groups that token t, of request `own` [1], attends to, and their number."""
    selected = None if groups.selection is None else groups.selection[t]
    count = (position + 1) // groups.group_size if selected is None else jnp.sum(selected >= 0)

    def read(index: jax.Array) -> jax.Array:
        index = jnp.minimum(index, jnp.maximum(count - 1, 0))
        number = index if selected is None else jnp.maximum(selected[index], 0)
        tables = groups.block_tables[own]
        return read_groups(groups.cache, tables, number[None], group_size=groups.group_size)[0]

    return read, count


def _attend(query: jax.Array, read: Reader, count: jax.Array, carry: OnlineSoftmax) -> OnlineSoftmax:
    """Attends with a query [H, D] to `count` more entries.

    `read` maps numbers i32 [N] to entries float32 [N, D]; numbers from `count` on give any of them.
    """

    def one_tile(i: jax.Array, carry: OnlineSoftmax) -> OnlineSoftmax:
        index = i * TILE_ENTRIES + jnp.arange(TILE_ENTRIES, dtype=jnp.int32)
        entries = read(index)
        scores = jnp.where(index < count, product("hd,nd->hn", query, entries), -jnp.inf)
        carry, weights = carry.add_scores(scores)
        return carry.add_values(product("hn,nd->hd", weights, entries))

    return lax.fori_loop(0, (count + TILE_ENTRIES - 1) // TILE_ENTRIES, one_tile, carry)


def attention_within_sequences(
    q: jax.Array,
    sinks: jax.Array,
    entries: jax.Array,
    sees: jax.Array,
    group_entries: jax.Array,
    sees_groups: jax.Array,
    *,
    scale: float,
) -> jax.Array:
    """Returns [T, H, D] of q [T, H, D] to entries [T, D] and [C, D], where `sees` [T, T], `sees_groups` [T, C]."""
    entries = jnp.concatenate([entries, group_entries.astype(entries.dtype)])
    scores = jnp.einsum("thd,sd->hts", q, entries, preferred_element_type=jnp.float32) * scale
    scores = jnp.where(jnp.concatenate([sees, sees_groups], axis=1), scores, -jnp.inf)
    sinks = jnp.broadcast_to(sinks[:, None, None], (*scores.shape[:2], 1))
    weights = jax.nn.softmax(jnp.concatenate([scores, sinks], axis=-1), axis=-1)[..., :-1]
    return jnp.einsum("hts,sd->thd", weights.astype(entries.dtype), entries)
