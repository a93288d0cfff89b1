"""Selection of groups in two stages: one layer chooses blocks of groups, and later ones score these alone (V4.1).

A block's score is the largest score of its groups that a query sees. The block of the last group that it sees is always
chosen; of equal scores, earlier blocks and groups come first.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from jaxis.kernels.batch import Batch
from jaxis.kernels.index_selection.blocks import best_blocks, best_blocks_of_whole_sequences
from jaxis.kernels.index_selection.groups import best_groups, groups_up_to
from jaxis.kernels.index_selection.reference import scores_of_keys, select_from_whole_sequences
from jaxis.kernels.index_selection.tiled import CHUNK_TOKENS, TILE_QUERIES, by_tiles, scores_of_contexts
from jaxis.kernels.paged_cache import PagedCache
from jaxis.kernels.token_groups import ClosedGroups, read_groups

Stages = tuple[jax.Array, jax.Array | None]
"""A selection, and the candidates of later ones: as `best_groups` and i32 [T, blocks], or each bool [T, C]."""


@dataclass(frozen=True)
class CandidateBlocks:
    """Sizes of the first stage.

    Attributes:
      number: The most blocks of a token. Together, they have at least as many groups as are selected.
      size: Groups of a block.
      are_chosen: True for the layer that chooses them, which selects among all groups itself.
    """

    number: int
    size: int
    are_chosen: bool


def select_in_stages(
    q: jax.Array,
    weights: jax.Array,
    key_cache: PagedCache,
    candidates: jax.Array | None,
    batch: Batch,
    *,
    num_groups: int,
    group_size: int,
    blocks: CandidateBlocks | None,
) -> Stages:
    """Returns a selection of a layer that chooses candidates, selects among them, or has none (`blocks` None).

    Takes the arguments of `best_groups`. A group has at most one block of the cache.
    """
    selection = None
    if blocks is None or blocks.are_chosen:
        selection = best_groups(q, weights, key_cache, batch, num_groups=num_groups, group_size=group_size)
        if blocks is None:
            return selection, candidates
    request, last = groups_up_to(group_size, batch)
    block_tables, num_rows = batch.block_tables, batch.num_tokens
    operands, size, at_once = (q, weights, request, last), blocks.size, -(-CHUNK_TOKENS // blocks.size)

    def blocks_of_tile(*rows: jax.Array) -> jax.Array:
        _, q, weights, request, last = rows
        scores = scores_of_contexts(q, weights, key_cache.array, block_tables[request], last, size)
        scores = jnp.pad(scores, ((0, 0), (0, -scores.shape[1] % size)), constant_values=-jnp.inf)
        return best_blocks(jnp.max(scores.reshape(len(q), -1, size), axis=-1), last // size, blocks.number)

    def groups_of_tile(*rows: jax.Array) -> jax.Array:
        _, q, weights, request, last, chosen = rows
        groups = chosen[..., None] * size + jnp.arange(size, dtype=jnp.int32)
        sees = (chosen[..., None] >= 0) & (groups <= last[:, None, None])
        groups, sees = (x.reshape(TILE_QUERIES, -1) for x in (groups, sees))

        def one_chunk(i: jax.Array, scores: jax.Array) -> jax.Array:
            begin, length = i * at_once * size, at_once * size
            numbers, visible = (lax.dynamic_slice_in_dim(x, begin, length, axis=1) for x in (groups, sees))
            keys = read_groups(key_cache, block_tables[request], jnp.where(visible, numbers, 0), group_size=group_size)
            # What no token has written may be garbage: a NaN there must not spread.
            keys = jnp.where(visible[..., None], keys, 0)
            found = jnp.where(visible, scores_of_keys(q[:, None], weights[:, None], keys)[:, 0], -jnp.inf)
            return lax.dynamic_update_slice_in_dim(scores, found, begin, axis=1)

        num_chunks = (jnp.max(jnp.sum(chosen >= 0, axis=1)) + at_once - 1) // at_once
        scores = lax.fori_loop(0, num_chunks, one_chunk, jnp.full(groups.shape, -jnp.inf, jnp.float32))
        found, best = lax.top_k(scores, num_groups)
        most = jnp.iinfo(jnp.int32).max
        best = jnp.sort(jnp.where(found > -jnp.inf, jnp.take_along_axis(groups, best, axis=1), most), axis=1)
        return jnp.where(best < most, best, -1)

    def none(width: int) -> jax.Array:
        return jnp.full((q.shape[0], width), -1, jnp.int32)

    if selection is not None:
        return selection, by_tiles(blocks_of_tile, none(blocks.number), *operands, num_rows=num_rows)
    assert candidates is not None
    chosen = jnp.pad(candidates, ((0, 0), (0, -blocks.number % at_once)), constant_values=-1)
    return by_tiles(groups_of_tile, none(num_groups), *operands, chosen, num_rows=num_rows), candidates


def select_in_stages_of_whole_sequences(
    q: jax.Array,
    weights: jax.Array,
    keys: jax.Array,
    candidates: jax.Array | None,
    closed: ClosedGroups,
    sees: jax.Array,
    *,
    num_groups: int,
    blocks: CandidateBlocks | None,
) -> Stages:
    """Returns `select_in_stages` of whole sequences, for the keys [C, D] of groups that tokens see, bool [T, C]."""
    among = sees if candidates is None or blocks is None else candidates
    selection = select_from_whole_sequences(q, weights, keys, among, num_selected=num_groups)
    if blocks is None or not blocks.are_chosen:
        return selection, candidates
    scores = jnp.where(sees, scores_of_keys(q, weights, keys), -jnp.inf)
    number = jnp.arange(len(keys), dtype=jnp.int32)
    # A block has the number of its first group's key.
    block = jnp.where(closed.valid, number - closed.group % blocks.size, number)
    own = block[jnp.max(jnp.where(sees, number, 0), axis=1)]
    return selection, sees & best_blocks_of_whole_sequences(scores.T[:, None], block, own, blocks.number)[0]
