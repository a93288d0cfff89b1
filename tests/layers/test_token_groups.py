"""Rows of groups of tokens: against a plain loop, in any steps, after wrong drafts, and on shared prefixes."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxis.config.attention_span import FULL_CONTEXT, AttentionSpan
from jaxis.errors import ConfigError
from jaxis.kernels.paged_cache import from_stored, to_stored
from jaxis.kernels.token_groups import ordered_softmax_sum
from jaxis.layers.attention_metadata import AttentionMetadata
from jaxis.layers.indexer import IndexCacheSpec
from jaxis.layers.token_groups import RowCacheSpec, TokenGroups
from tests.support.attention_steps import BFLOAT16

BLOCK_SIZE, NUM_BLOCKS, MAX_BLOCKS, DIM = 8, 40, 6, 16
GROUPS = {
    **{"chunks": TokenGroups(4, 4), "whole blocks": TokenGroups(8, 8), "several blocks": TokenGroups(16, 16)},
    "overlapping": TokenGroups(4, 8),
}


def combine(rows, exists, first_position):
    """A softmax over the window, and the position, so that one out of place shows."""
    values, gates = jnp.split(rows, 2, axis=-1)
    gates = jnp.where(exists[..., None], gates, -jnp.inf)
    return ordered_softmax_sum(gates, values) + first_position[:, None]


def expected(rows, groups):
    """The rows of all closed groups of a sequence, in float64."""
    result = []
    for end in range(groups.size, len(rows) + 1, groups.size):
        values, gates = np.split(rows[max(0, end - groups.window) : end].astype(np.float64), 2, axis=1)
        weights = np.exp(gates - gates.max(0))
        result.append((weights * values).sum(0) / weights.sum(0) + end - groups.size)
    return np.array(result).reshape(-1, DIM)


@functools.cache
def updater(groups, span):
    def update(rows, row_cache, group_cache, metadata):
        return groups.update(combine, rows, row_cache, group_cache, metadata, row_span=span)

    return jax.jit(update, donate_argnums=(1, 2))


@dataclass
class Sequence:
    rows: np.ndarray
    length: int = 0
    tables: dict[AttentionSpan, list[int]] = field(default_factory=dict)


class Caches:
    """Two pools of blocks. What a block had before it was given out is NaN; so is what the span no longer sees."""

    def __init__(self, groups, dtype=np.float32, span=None):
        self.groups, self.spans = groups, (FULL_CONTEXT, span or groups.span)
        specs = (IndexCacheSpec(DIM, 1, groups.size), RowCacheSpec(2 * DIM, self.spans[1]))
        self.arrays = []
        for spec in specs:
            layout = spec.layout(BLOCK_SIZE, dtype)
            self.arrays.append(layout.cache(to_stored(jnp.full((NUM_BLOCKS, *layout.shape), jnp.nan), layout.dtype)))
        self.free = {span: list(np.random.default_rng(0).permutation(NUM_BLOCKS)) for span in self.spans}

    def step(self, work, pad_tokens=64, pad_requests=4):
        """Runs the next tokens of sequences, (sequence, number)."""
        rows = np.full((pad_tokens, 2 * DIM), np.nan, np.float32)
        positions, starts = np.zeros(pad_tokens, np.int32), np.zeros(pad_requests + 1, np.int32)
        tables = {span: np.zeros((pad_requests, MAX_BLOCKS), np.int32) for span in self.spans}
        seq_lens = np.zeros(pad_requests, np.int32)
        for r, (sequence, number) in enumerate(work):
            begin, end = starts[r], starts[r] + number
            rows[begin:end] = sequence.rows[sequence.length : sequence.length + number]
            positions[begin:end] = sequence.length + np.arange(number)
            starts[r + 1 :] = end
            first, sequence.length = sequence.length, sequence.length + number
            seq_lens[r] = sequence.length
            for span in self.spans:
                table = sequence.tables.setdefault(span, [])
                while len(table) * BLOCK_SIZE < sequence.length:
                    table.append(self.free[span].pop())
                visible = range(span.first_visible(first) // BLOCK_SIZE, len(table))
                tables[span][r, visible] = [table[i] for i in visible]
        metadata = AttentionMetadata(
            jnp.asarray(positions),
            jnp.asarray(tables[FULL_CONTEXT]),
            jnp.asarray(seq_lens),
            jnp.asarray(starts),
            jnp.asarray([0, 0, len(work)], jnp.int32),
            spans=self.spans,
            other_block_tables=(jnp.asarray(tables[self.spans[1]]),),
        )
        update = updater(self.groups, self.spans[1])
        self.arrays[1], self.arrays[0] = update(jnp.asarray(rows), self.arrays[1], self.arrays[0], metadata)

    def rows_of(self, sequence):
        """The cached rows of the sequence's closed groups."""
        array = np.asarray(self.arrays[0].array)
        apart = max(1, self.groups.size // BLOCK_SIZE)
        blocks = array[sequence.tables[FULL_CONTEXT]][apart - 1 :: apart] if sequence.length else array[:0]
        return blocks.reshape(-1, array.shape[-1])[: sequence.length // self.groups.size]


def make_rows(length, seed):
    return np.random.default_rng(seed).standard_normal((length, 2 * DIM)).astype(np.float32)


def run(groups, sequences, steps, **options):
    """The cached rows of the sequences after steps, each the number of tokens of each sequence."""
    caches = Caches(groups, **options)
    for step in steps:
        caches.step([(sequence, number) for sequence, number in zip(sequences, step, strict=True) if number])
    return [caches.rows_of(sequence) for sequence in sequences]


@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)
def test_groups_of_ragged_steps_have_the_rows_of_a_plain_loop_and_the_bits_of_whole_prompts(groups):
    lengths = (45, 8, 3)
    at_once = [run(groups, [Sequence(make_rows(n, n))], [[n]])[0] for n in lengths]
    for found, n in zip(at_once, lengths, strict=True):
        np.testing.assert_allclose(found, expected(make_rows(n, n), groups), rtol=1e-5, atol=1e-5)
    rng = np.random.default_rng(1)
    for _ in range(4):
        left, steps = list(lengths), []
        while any(left):
            steps.append([min(n, int(rng.integers(0, 12))) for n in left])
            left = [n - done for n, done in zip(left, steps[-1], strict=True)]
        found = run(groups, [Sequence(make_rows(n, n)) for n in lengths], steps)
        for mine, whole in zip(found, at_once, strict=True):
            np.testing.assert_array_equal(mine, whole)


@pytest.mark.parametrize("dtype", [np.float32, BFLOAT16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)
def test_chunks_of_every_size_give_the_same_bits(groups, dtype):
    rows = make_rows(21, 0)
    whole = run(groups, [Sequence(rows)], [[21]], dtype=dtype)[0]
    found = from_stored(jnp.asarray(whole)).astype(np.float32)
    np.testing.assert_allclose(found, expected(rows, groups), rtol=0.02, atol=0.02)
    for size in (1, 2, 3, 4, 5, 7, 8, 9):
        steps = [[min(size, 21 - done)] for done in range(0, 21, size)]
        np.testing.assert_array_equal(run(groups, [Sequence(rows)], steps, dtype=dtype)[0], whole)


@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)
def test_drafts_that_were_wrong_leave_nothing(groups):
    rows, caches, wrong = make_rows(40, 0), Caches(groups), make_rows(60, 1)
    sequence = Sequence(rows)
    rng = np.random.default_rng(0)
    while sequence.length < 40:
        right = min(int(rng.integers(1, 5)), 40 - sequence.length)
        known = sequence.length + right
        sequence.rows = np.concatenate([rows[:known], wrong[:6]])
        caches.step([(sequence, right + 6 if known + 6 <= MAX_BLOCKS * BLOCK_SIZE else right)])
        sequence.length = known
        for table in sequence.tables.values():
            del table[-(-known // BLOCK_SIZE) :]
    np.testing.assert_array_equal(caches.rows_of(sequence), run(groups, [Sequence(rows)], [[40]])[0])


@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)
def test_a_sequence_continues_a_shared_prefix(groups):
    caches, first = Caches(groups), Sequence(make_rows(30, 0))
    caches.step([(first, 30)])
    rows = np.concatenate([first.rows[:16], make_rows(13, 1)])
    second = Sequence(rows, 16, {span: table[:2] for span, table in first.tables.items()})
    caches.step([(second, 13)])
    np.testing.assert_array_equal(caches.rows_of(second), run(groups, [Sequence(rows)], [[29]])[0])
    np.testing.assert_array_equal(caches.rows_of(first), run(groups, [Sequence(first.rows)], [[30]])[0])


def test_a_span_that_sees_more_serves_as_well():
    rows, groups = make_rows(30, 0), GROUPS["overlapping"]
    wide = run(groups, [Sequence(rows)], [[7], [12], [11]], span=AttentionSpan(sliding_window=20))[0]
    np.testing.assert_array_equal(wide, run(groups, [Sequence(rows)], [[30]])[0])


def test_an_int8_cache_keeps_the_rows_of_open_groups_in_full():
    rows, groups = make_rows(20, 0), GROUPS["chunks"]
    found = run(groups, [Sequence(rows)], [[9], [11]], dtype=np.int8)[0]
    scales = np.ascontiguousarray(found[:, DIM:]).view(np.float32)
    error = np.abs(found[:, :DIM] * scales - expected(rows, groups))
    assert (error <= 0.501 * scales).all()


@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)
def test_whole_sequences_have_the_same_rows(groups):
    lengths = (13, 3, 24)
    rows = [make_rows(n, n) for n in lengths]
    metadata = AttentionMetadata.for_whole_sequences(lengths)
    closed, found = groups.combine_whole_sequences(combine, jnp.asarray(np.concatenate(rows)), metadata)
    count = int(closed.count)
    assert count == sum(n // groups.size for n in lengths)
    np.testing.assert_allclose(found[:count], np.concatenate([expected(x, groups) for x in rows]), rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(closed.request[:count], np.repeat(np.arange(3), [n // groups.size for n in lengths]))


@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)
def test_rows_of_whole_sequences_have_the_derivatives_of_a_plain_loop(groups):
    lengths = (13, 3, 24)
    metadata = AttentionMetadata.for_whole_sequences(lengths)
    factors = jnp.asarray(make_rows(16, 0)[:, :DIM])

    def of_groups(rows):
        closed, found = groups.combine_whole_sequences(combine, rows, metadata)
        return jnp.sum(jnp.where(closed.valid[:, None], found, 0) * factors[: len(found)])

    def of_loop(rows):
        parts = jnp.split(rows, np.cumsum(lengths)[:-1])
        windows = [
            part[max(0, end - groups.window) : end]
            for part in parts
            for end in range(groups.size, len(part) + 1, groups.size)
        ]
        sums = [(jax.nn.softmax(window[:, DIM:], axis=0) * window[:, :DIM]).sum(0) for window in windows]
        return jnp.sum(jnp.stack(sums) * factors[: len(sums)])

    rows = jnp.asarray(np.concatenate([make_rows(n, n) for n in lengths]))
    np.testing.assert_allclose(jax.grad(of_groups)(rows), jax.grad(of_loop)(rows), rtol=1e-4, atol=1e-6)


def test_blocks_that_groups_do_not_divide_are_refused():
    with pytest.raises(ConfigError, match=r"block_size=24 is not a multiple of the 16 tokens .*: use 32"):
        IndexCacheSpec(DIM, 1, 16).layout(24, np.float32)
