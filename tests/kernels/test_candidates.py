"""Selection in two stages: blocks of groups, then the best groups in them; against sorts in numpy."""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest

from jaxis.kernels.index_selection.candidates import (
    CandidateBlocks,
    select_in_stages,
    select_in_stages_of_whole_sequences,
)
from jaxis.kernels.token_groups import ClosedGroups
from jaxis.layers.attention_metadata import AttentionMetadata
from tests.kernels.test_group_selection import CACHE_TYPES, MIX, Step

NUM_BLOCKS, BLOCK_KEYS, NUM_GROUPS = 4, 5, 7
FIRST, SECOND = (CandidateBlocks(NUM_BLOCKS, BLOCK_KEYS, are_chosen=is_first) for is_first in (True, False))


def candidates(scores):
    """The groups in the best blocks, of which the last one is always one."""
    blocks = [scores[i : i + BLOCK_KEYS].max() for i in range(0, len(scores), BLOCK_KEYS)]
    order = sorted(range(len(blocks)), key=lambda b: (b != len(blocks) - 1, -blocks[b], b))
    return sorted(order[:NUM_BLOCKS])


def expected(source, later):
    """The blocks by one indexer's scores, and the groups by another's."""
    row, blocks, groups = 0, [], []
    for keys, (history, tokens) in zip(source.keys, source.requests, strict=True):
        for position in range(history, history + tokens):
            seen = keys[: (position + 1) // source.group_size]
            first, second = (each.weights[row] @ np.maximum(each.q[row] @ seen.T, 0) for each in (source, later))
            blocks.append(candidates(first))
            among = [g for b in blocks[-1] for g in range(b * BLOCK_KEYS, min((b + 1) * BLOCK_KEYS, len(seen)))]
            groups.append(sorted(sorted(among, key=lambda g: (-second[g], g))[:NUM_GROUPS]))
            row += 1
    return blocks, groups


def other(step):
    rng = np.random.default_rng(7)
    return Step(
        rng.permutation(step.q), rng.permutation(step.weights), step.keys, step.requests, step.group_size, step.delay
    )


@functools.cache
def program(group_size, blocks):
    return jax.jit(functools.partial(select_in_stages, num_groups=NUM_GROUPS, group_size=group_size, blocks=blocks))


def selected(source, later, dtype=np.float32):
    """The blocks that one indexer chooses, and what another selects of them."""
    q, weights, cache, batch = source.arguments(dtype)
    _, blocks = program(source.group_size, FIRST)(q, weights, cache, None, batch)
    q, weights, *_ = later.arguments(dtype)
    groups, _ = program(source.group_size, SECOND)(q, weights, cache, blocks, batch)
    return np.asarray(blocks), np.asarray(groups)


@CACHE_TYPES
@pytest.mark.parametrize("group_size", [1, 2])
def test_groups_are_selected_in_the_blocks_that_another_layer_chose(group_size, dtype):
    source = Step.make(MIX, group_size)
    later = other(source)
    for found, wanted in zip(selected(source, later, dtype), expected(source, later), strict=True):
        for row, each in zip(found, wanted, strict=False):
            np.testing.assert_array_equal(row, np.pad(each, (0, len(row) - len(each)), constant_values=-1))
        assert (found[len(source.q) :] == -1).all()


def test_whole_sequences_have_the_same_candidates():
    source = Step.make([(0, 83), (0, 1), (0, 40)], 2)
    lengths = [83, 1, 40]
    closed = ClosedGroups.of(AttentionMetadata.for_whole_sequences(lengths).batch, 2)
    request, token = np.repeat(np.arange(3), lengths), np.arange(124)
    sees = (request[:, None] == closed.request) & (token[:, None] >= closed.row) & closed.valid
    keys = np.zeros((len(closed.group), 32), np.float32)
    keys[: int(closed.count)] = np.concatenate(source.keys)
    options = {"num_groups": NUM_GROUPS, "blocks": FIRST}
    _, found = select_in_stages_of_whole_sequences(source.q, source.weights, keys, None, closed, sees, **options)
    blocks, _ = expected(source, source)
    number = np.asarray(closed.group)
    for row, visible, wanted in zip(np.asarray(found), np.asarray(sees), blocks, strict=True):
        np.testing.assert_array_equal(row, visible & np.isin(number // BLOCK_KEYS, wanted))
