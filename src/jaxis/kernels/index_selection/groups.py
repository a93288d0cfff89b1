"""Selection of groups of G consecutive tokens, one key for each group (`kernels.token_groups`).

A token sees the groups whose last token is not after it, or with a `delay` of 1 is before it, and selects the best of
them. It attends to the tokens of these, and to its open tokens: those up to itself that no group it sees has. A token
that sees few enough groups attends to all tokens up to itself.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxis.kernels.index_selection import cpu, tiled
from jaxis.kernels.index_selection.reference import select_from_whole_sequences
from jaxis.kernels.paged_cache import PagedCache
from jaxis.kernels.ragged_paged_attention.layout import request_of_token, sees_in_request
from jaxis.kernels.token_groups import ClosedGroups


def num_selected_tokens(num_groups: int, group_size: int, delay: int = 0) -> int:
    """Returns K, the most tokens that a token attends to; one at a position below K attends to all before it."""
    return num_groups * group_size + group_size - 1 + delay


def best_groups(
    q: jax.Array,
    weights: jax.Array,
    key_cache: PagedCache,
    positions: jax.Array,
    seq_lens: jax.Array,
    block_tables: jax.Array,
    query_start_loc: jax.Array,
    request_distribution: jax.Array,
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
        block_tables = block_tables[:, blocks - 1 :: blocks]  # a group's key is in the block of its last token
    if key_cache.layout.kernels == "native":
        rest = (seq_lens, block_tables, query_start_loc, request_distribution)
        options = {"num_groups": num_groups, "group_size": group_size, "delay": delay}
        return cpu.best_groups(q, weights, key_cache.array, *rest, **options)
    request, last, rows = groups_up_to(group_size, positions, query_start_loc, request_distribution, delay=delay)
    return tiled.best_keys(q, weights, key_cache.array, last, request, block_tables, rows, num_selected=num_groups)


def groups_up_to(
    group_size: int,
    positions: jax.Array,
    query_start_loc: jax.Array,
    request_distribution: jax.Array,
    *,
    delay: int = 0,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns each token's request i32 [T], the last group that it sees (-1 for none), and the number of rows."""
    request, valid = request_of_token(query_start_loc, request_distribution[2], positions.shape[0])
    last = jnp.where(valid, (positions + 1 - delay) // group_size - 1, -1)
    return request, last, query_start_loc[request_distribution[2]]


def select_groups(
    q: jax.Array,
    weights: jax.Array,
    key_cache: PagedCache,
    positions: jax.Array,
    seq_lens: jax.Array,
    block_tables: jax.Array,
    query_start_loc: jax.Array,
    request_distribution: jax.Array,
    *,
    num_groups: int,
    group_size: int,
    delay: int = 0,
) -> jax.Array:
    """Returns the positions that each token attends to, i32 [T, K], ascending, then -1, for `best_groups`' arguments.

    K is `num_selected_tokens`.
    """
    rest = (positions, seq_lens, block_tables, query_start_loc, request_distribution)
    groups = best_groups(q, weights, key_cache, *rest, num_groups=num_groups, group_size=group_size, delay=delay)
    _, valid = request_of_token(query_start_loc, request_distribution[2], q.shape[0])
    return _tokens_of(groups, jnp.where(valid, positions, -1), group_size, delay)


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
    positions: jax.Array,
    query_start_loc: jax.Array,
    num_requests: jax.Array,
    *,
    num_groups: int,
    group_size: int,
    delay: int = 0,
) -> jax.Array:
    """Returns bool [T, T], True where a token of a batch of whole sequences attends to another.

    Takes the keys [C, D] of the closed groups.
    """
    num_tokens = q.shape[0]
    request, valid = request_of_token(query_start_loc, num_requests, num_tokens)
    token = jnp.arange(num_tokens)
    is_own = sees_in_request(request, valid)
    sees = (request[:, None] == closed.request) & (token[:, None] >= closed.row + delay) & closed.valid
    sees = select_from_whole_sequences(q, weights, keys, sees, num_selected=num_groups)
    is_member = (request[:, None] == closed.request) & (positions[:, None] // group_size == closed.group) & closed.valid
    in_open = positions >= ((positions + 1 - delay) // group_size * group_size)[:, None]
    in_best = sees.astype(jnp.float32) @ is_member.astype(jnp.float32).T > 0
    return is_own & (in_best | in_open)
