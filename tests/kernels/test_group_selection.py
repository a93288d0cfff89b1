"""The selection of groups of tokens that share a key: against a stable sort, and batch-invariant."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxis.kernels import native
from jaxis.kernels.batch import Batch
from jaxis.kernels.index_selection import (
    group_cache_layout,
    num_selected_tokens,
    select_groups,
    select_groups_of_whole_sequences,
)
from jaxis.kernels.token_groups import ClosedGroups
from jaxis.layers.attention_metadata import AttentionMetadata
from tests.support.attention_steps import BFLOAT16, quantize
from tests.support.isa import each_isa, isa  # noqa: F401 (isa is a fixture)

needs_native = pytest.mark.skipif(native.library() is None, reason="the native library is not built")
HEADS, DIM, BLOCK_SIZE, NUM_GROUPS = 5, 32, 16, 3
CACHE_TYPES = pytest.mark.parametrize("dtype", [np.float32, BFLOAT16, np.int8], ids=["float32", "bfloat16", "int8"])
# Tokens in the cache, and tokens of the step.
MIX = [(70, 1), (0, 13), (300, 1), (40, 31), (3, 1), (7, 2)]


@dataclass
class Step:
    """Small whole numbers: sums are exact in any order and every type, and many scores are equal."""

    q: np.ndarray
    weights: np.ndarray
    keys: list[np.ndarray]
    requests: list[tuple[int, int]]
    group_size: int
    delay: int = 0

    @classmethod
    def make(cls, requests, group_size, delay=0):
        rng = np.random.default_rng(0)
        num_tokens = sum(tokens for _, tokens in requests)
        q = rng.integers(-1, 2, size=(num_tokens, HEADS, DIM)).astype(np.float32)
        weights = rng.integers(-2, 3, size=(num_tokens, HEADS)).astype(np.float32)
        keys = [rng.integers(-1, 2, size=(sum(r) // group_size, DIM)).astype(np.float32) for r in requests]
        return cls(q, weights, keys, requests, group_size, delay)

    def expected(self):
        row, result = 0, []
        for keys, (history, tokens) in zip(self.keys, self.requests, strict=True):
            for position in range(history, history + tokens):
                closed = (position + 1 - self.delay) // self.group_size
                scores = self.weights[row] @ np.maximum(self.q[row] @ keys[:closed].T, 0)
                best = np.sort(np.argsort(-scores, kind="stable")[:NUM_GROUPS])
                selected = [g * self.group_size + i for g in best for i in range(self.group_size)]
                result.append([*selected, *range(closed * self.group_size, position + 1)])
                row += 1
        return result

    def select(self, dtype=np.float32, padding=5, *, is_native=False):
        chosen = selector(self.group_size, self.delay, native.isa())
        return np.asarray(chosen(*self.arguments(dtype, padding, is_native=is_native)))

    def arguments(self, dtype=np.float32, padding=5, *, is_native=False):
        """A cache with NaN where no group is, blocks in a scattered order, and two requests of padding."""
        lengths = np.array([sum(request) for request in self.requests], np.int32)
        layout = group_cache_layout(BLOCK_SIZE, self.group_size, DIM, dtype)
        layout = dataclasses.replace(layout, kernels="native" if is_native else "any")
        per_block, most = layout.shape[0], int(-(-lengths.max() // BLOCK_SIZE)) + 1
        free = np.random.default_rng(1).permutation(len(lengths) * most)
        cache = np.full((len(free), per_block, DIM), np.nan, np.float32)
        tables = np.zeros((len(lengths) + 2, most), np.int32)
        tables[: len(lengths)] = free.reshape(len(lengths), most)
        for table, keys in zip(tables, self.keys, strict=False):
            for group, key in enumerate(keys):
                cache[table[((group + 1) * self.group_size - 1) // BLOCK_SIZE], group % per_block] = key
        if dtype == np.int8:
            codes, scales = quantize(np.nan_to_num(cache))
            scales = np.where(np.isnan(cache[..., :1]), np.float32(np.nan), scales)
            cache = np.concatenate([codes, scales.view(np.int8)], axis=-1)
        counts = [tokens for _, tokens in self.requests]
        starts = np.concatenate([[0], np.cumsum(counts), [sum(counts)] * 2]).astype(np.int32)
        positions = [np.arange(h, h + t, dtype=np.int32) for h, t in self.requests]
        positions = np.pad(np.concatenate(positions), (0, padding))
        rows = [(0, padding), *[(0, 0)] * 2]
        return (
            np.pad(self.q, rows, constant_values=np.nan),
            np.pad(self.weights, rows[:2], constant_values=np.nan),
            layout.cache(jnp.asarray(cache.astype(dtype).view(layout.dtype))),
            Batch(np.pad(lengths, (0, 2)), tables, starts, np.array([0, 0, len(counts)], np.int32), positions),
        )


@functools.cache
def selector(group_size, delay, name):
    """A program of its own for each instruction set: it names the kernel."""
    del name
    return jax.jit(functools.partial(select_groups, num_groups=NUM_GROUPS, group_size=group_size, delay=delay))


@pytest.mark.sampled(3)
@CACHE_TYPES
@pytest.mark.parametrize(("group_size", "delay"), [(2, 0), (4, 0), (16, 0), (4, 1), (32, 0)])
def test_the_tokens_of_the_best_groups_and_of_the_open_one_are_selected(group_size, delay, dtype):
    check(Step.make(MIX, group_size, delay), dtype, is_native=False)


@each_isa
@CACHE_TYPES
def test_the_native_kernel_selects_the_same(isa, dtype):  # noqa: F811
    for group_size, delay in ((2, 0), (4, 0), (16, 0), (4, 1), (32, 0)):
        check(Step.make(MIX, group_size, delay), dtype, is_native=True)


def check(step, dtype, **options):
    selected = step.select(dtype, **options)
    assert selected.shape[1] == num_selected_tokens(NUM_GROUPS, step.group_size, step.delay)
    for row, expected in zip(selected, step.expected(), strict=False):
        np.testing.assert_array_equal(row, np.pad(expected, (0, len(row) - len(expected)), constant_values=-1))
    assert (selected[len(step.q) :] == -1).all()


def test_tokens_with_few_groups_see_everything():
    size = num_selected_tokens(NUM_GROUPS, 4)
    selected = Step.make([(0, size + 3)], 4).select()
    assert [len(row[row >= 0]) for row in selected[: size + 3]] == [*range(1, size + 1), 12, 13, 14]


@pytest.mark.parametrize("is_native", [False, pytest.param(True, marks=needs_native)])
def test_real_scores_select_the_same_regardless_of_the_batch(is_native):
    """Numbers whose sums depend on their order."""
    rng = np.random.default_rng(1)
    step = Step.make([(90, 1), (50, 24)], 4)
    step.q = rng.standard_normal(step.q.shape).astype(np.float32)
    together = step.select(is_native=is_native)
    for keys, request, rows in zip(step.keys, step.requests, (slice(0, 1), slice(1, 25)), strict=True):
        alone = Step(step.q[rows], step.weights[rows], [keys], [request], 4).select(padding=0, is_native=is_native)
        np.testing.assert_array_equal(alone, together[rows])


@pytest.mark.parametrize("delay", [0, 1])
def test_whole_sequences_select_as_the_cache_does(delay):
    step = Step.make([(0, 40), (0, 3), (0, 23)], 4, delay)
    batch = AttentionMetadata.for_whole_sequences([40, 3, 23]).batch
    closed = ClosedGroups.of(batch, 4)
    keys = np.full((len(closed.group), DIM), np.nan, np.float32)
    keys[: int(closed.count)] = np.concatenate(step.keys)
    chosen = select_groups_of_whole_sequences(
        jnp.asarray(step.q),
        jnp.asarray(step.weights),
        jnp.asarray(keys),
        closed,
        batch,
        num_groups=NUM_GROUPS,
        group_size=4,
        delay=delay,
    )
    for row, expected in enumerate(step.expected()):
        np.testing.assert_array_equal(np.flatnonzero(chosen[row]), row - int(batch.positions[row]) + np.array(expected))
