"""Selection of groups of G consecutive tokens, one key for each group (`kernels.token_groups`).

A token sees the groups whose last token is not after it, or with a `delay` of 1 is before it, and selects the best of
them. It attends to the tokens of these, and to its open tokens: those up to itself that no group it sees has. A token
that sees few enough groups attends to all tokens up to itself.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxis.kernels.batch import Batch, sees_in_request
from jaxis.kernels.index_selection import cpu, tiled
from jaxis.kernels.index_selection.reference import select_from_whole_sequences
from jaxis.kernels.paged_cache import PagedCache
from jaxis.kernels.token_groups import ClosedGroups


def num_selected_tokens(num_groups: int, group_size: int, delay: int = 0) -> int:
    """Returns K, the most tokens that a token attends to; one at a position below K attends to all before it."""
    return num_groups * group_size + group_size - 1 + delay


def best_groups(
    q: jax.Array,
    weights: jax.Array,
    key_cache: PagedCache,
    batch: Batch,
    *,
    num_groups: int,
    group_size: int,
    delay: int = 0,
) -> jax.Array:
    """Returns the numbers of the best groups of each token, i32 [T, num_groups], ascending, then -1.

    Takes the arguments of `select_tokens`; `key_cache` has the keys of all closed groups, this step's included. Of
    equal scores, earlier groups come first.
    """
    if (blocks := group_size // key_cache.layout.block_size) > 1:
        # A group's key is in the block of its last token.
        batch = batch._replace(block_tables=batch.block_tables[:, blocks - 1 :: blocks])
    if key_cache.layout.kernels == "native":
        options = {"num_groups": num_groups, "group_size": group_size, "delay": delay}
        return cpu.best_groups(q, weights, key_cache.array, batch, **options)
    request, last = groups_up_to(group_size, batch, delay=delay)
    of_batch = (request, batch.block_tables, batch.num_tokens)
    return tiled.best_keys(q, weights, key_cache.array, last, *of_batch, num_selected=num_groups)


def groups_up_to(group_size: int, batch: Batch, *, delay: int = 0) -> tuple[jax.Array, jax.Array]:
    """Returns each token's request i32 [T], and the last group that it sees, -1 for none."""
    request, valid = batch.request_of_token()
    return request, jnp.where(valid, (batch.positions + 1 - delay) // group_size - 1, -1)


def select_groups(
    q: jax.Array,
    weights: jax.Array,
    key_cache: PagedCache,
    batch: Batch,
    *,
    num_groups: int,
    group_size: int,
    delay: int = 0,
) -> jax.Array:
    """Returns the positions that each token attends to, i32 [T, K], ascending, then -1, for `best_groups`' arguments.

    K is `num_selected_tokens`.
    """
    groups = best_groups(q, weights, key_cache, batch, num_groups=num_groups, group_size=group_size, delay=delay)
    _, valid = batch.request_of_token()
    return _tokens_of(groups, jnp.where(valid, batch.positions, -1), group_size, delay)


def _tokens_of(groups: jax.Array, positions: jax.Array, group_size: int, delay: int) -> jax.Array:
    """Returns i32 [T, K] for the selected groups i32 [T, N] of tokens at `positions` i32 [T]; -1 for padding."""
    offset = jnp.arange(group_size, dtype=jnp.int32)
    closed = (groups[..., None] * group_size + offset).reshape(groups.shape[0], -1)
    position = positions[:, None]
    opened = (position + 1 - delay) // group_size * group_size + jnp.arange(group_size - 1 + delay, dtype=jnp.int32)
    tokens = jnp.concatenate([closed, jnp.where(opened <= position, opened, -1)], axis=1)
    every = jnp.arange(tokens.shape[1], dtype=jnp.int32)
    return jnp.where(position < tokens.shape[1], jnp.where(every <= position, every, -1), tokens)


def select_groups_of_whole_sequences(
    q: jax.Array,
    weights: jax.Array,
    keys: jax.Array,
    closed: ClosedGroups,
    batch: Batch,
    *,
    num_groups: int,
    group_size: int,
    delay: int = 0,
) -> jax.Array:
    """Returns bool [T, T], True where a token of a batch of whole sequences attends to another.

    Takes the keys [C, D] of the closed groups.
    """
    positions, token = batch.positions, jnp.arange(q.shape[0])
    request, valid = batch.request_of_token()
    is_own = sees_in_request(request, valid)
    sees = (request[:, None] == closed.request) & (token[:, None] >= closed.row + delay) & closed.valid
    sees = select_from_whole_sequences(q, weights, keys, sees, num_selected=num_groups)
    is_member = (request[:, None] == closed.request) & (positions[:, None] // group_size == closed.group) & closed.valid
    in_open = positions >= ((positions + 1 - delay) // group_size * group_size)[:, None]
    in_best = sees.astype(jnp.float32) @ is_member.astype(jnp.float32).T > 0
    return is_own & (in_best | in_open)
