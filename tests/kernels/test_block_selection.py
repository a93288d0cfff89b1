"""The selection of blocks of tokens for each head, native and in plain JAX: a stable sort, and batch-invariance."""

from __future__ import annotations

import dataclasses
import functools

import jax
import numpy as np
import pytest

from jaxis.kernels import native
from jaxis.kernels.index_selection import select_blocks
from tests.kernels.selection_steps import SelectionStep
from tests.support.attention_steps import BFLOAT16, paged
from tests.support.isa import each_isa, isa  # noqa: F401 (isa is a fixture)

MIX = [(70, 1), (0, 13), (300, 1), (40, 31), (3, 1), (7, 2)]
NUM_BLOCKS = 3
CACHE_TYPES = pytest.mark.parametrize("dtype", [np.float32, BFLOAT16, np.int8], ids=["float32", "bfloat16", "int8"])
needs_native = pytest.mark.skipif(native.library() is None, reason="the native library is not built")


@functools.cache
def jitted(name, group_size):
    """A program of its own for each instruction set: it names the kernel."""
    del name
    return jax.jit(functools.partial(select_blocks, num_blocks=NUM_BLOCKS, group_size=group_size))


def run(step, kernels, group_size):
    q, _, keys, cache, batch = step.all
    cache, selected = jitted(native.isa() if kernels == "native" else "", group_size)(
        q, keys, paged(cache, kernels), batch
    )
    return np.asarray(cache.array), np.asarray(selected)


def expected(step, group_size):
    """i32 [T, H, K], by a stable sort of the blocks' largest products in float64."""
    seq_lens, _, starts = step.operands.batch[:3]
    selected = np.full((*step.q.shape[:2], NUM_BLOCKS * group_size), -1, np.int32)
    for r, keys in enumerate(step.keys):
        for row in range(starts[r], starts[r + 1]):
            size = seq_lens[r] - (starts[r + 1] - row) + 1
            products = step.q[row].astype(np.float64) @ keys[:size].T
            scores = np.maximum.reduceat(products, np.arange(0, size, group_size), axis=1)
            scores[:, -1] = np.inf
            for head, of_head in enumerate(scores):
                best = np.sort(np.argsort(-of_head, kind="stable")[:NUM_BLOCKS])
                tokens = (best[:, None] * group_size + np.arange(group_size)).ravel()
                tokens = tokens[tokens < size]
                selected[row, head, : len(tokens)] = tokens
    return selected


@pytest.mark.parametrize("group_size", [4, 20])
@CACHE_TYPES
def test_plain_jax_selects_the_best_and_of_equals_the_earliest(dtype, group_size):
    step = SelectionStep.make(MIX, dtype=dtype)
    np.testing.assert_array_equal(run(step, "any", group_size)[1], expected(step, group_size))


@needs_native
@each_isa
@pytest.mark.parametrize("group_size", [4, 20])
@CACHE_TYPES
def test_the_native_kernel_selects_the_same_and_leaves_the_same_cache(isa, dtype, group_size):  # noqa: F811
    step = SelectionStep.make(MIX, dtype=dtype)
    cache, selected = run(step, "native", group_size)
    np.testing.assert_array_equal(selected, expected(step, group_size))
    np.testing.assert_array_equal(cache.view(np.uint8), run(step, "any", group_size)[0].view(np.uint8))


@needs_native
@pytest.mark.parametrize("group_size", [128, 1500])
def test_contexts_of_several_tasks(group_size):
    step = SelectionStep.make([(7000, 3), (2040, 1), (2000, 60)])
    np.testing.assert_array_equal(run(step, "native", group_size)[1], expected(step, group_size))


@needs_native
@each_isa
def test_real_products_select_the_best_regardless_of_the_batch(isa):  # noqa: F811
    rng = np.random.default_rng(1)
    step = SelectionStep.make([(90, 1), (50, 24), (0, 5)])
    real = dataclasses.replace(step, q=rng.standard_normal(step.q.shape).astype(np.float32))
    _, together = run(real, "native", 4)
    np.testing.assert_array_equal(together, expected(real, 4))
    starts = real.operands.batch.query_start_loc
    for r, chunks in ((0, [1]), (1, [16, 8])):
        cache, begin, parts = real.operands.kv_cache, 0, []
        for size in chunks:
            cache, selected = run(real.part(r, begin, begin + size, cache), "native", 4)
            parts.append(selected)
            begin += size
        np.testing.assert_array_equal(np.concatenate(parts), together[starts[r] : starts[r + 1]])
