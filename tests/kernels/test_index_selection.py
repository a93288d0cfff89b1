"""The selection of tokens, native and in plain JAX: against a stable sort, and batch-invariant."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxis.kernels import native
from jaxis.kernels.index_selection import index_cache_layout, select_from_whole_sequences, select_tokens, tiled
from tests.kernels.selection_steps import SelectionStep
from tests.support.attention_steps import BFLOAT16, paged
from tests.support.isa import each_isa, isa  # noqa: F401 (isa is a fixture)

MIX = [(70, 1), (0, 13), (300, 1), (40, 31), (3, 1), (7, 2)]
NUM_SELECTED = 11
CACHE_TYPES = pytest.mark.parametrize("dtype", [np.float32, BFLOAT16, np.int8], ids=["float32", "bfloat16", "int8"])
needs_native = pytest.mark.skipif(native.library() is None, reason="the native library is not built")


@functools.cache
def jitted(select, name, num_selected, always):
    """A program of its own for each instruction set: it names the kernel."""
    del name
    return jax.jit(functools.partial(select, num_selected=num_selected, always=always))


def run(step, select, num_selected=NUM_SELECTED, always=(0, 0)):
    q, weights, keys, cache, batch = step.all
    chosen = jitted(select, native.isa(), num_selected, always)
    if select is tiled.select_tokens:
        cache, selected = chosen(q, weights, keys, cache, batch)
    else:
        paged_cache, selected = chosen(q, weights, keys, paged(cache, "native" if native.usable() else "any"), batch)
        cache = paged_cache.array
    return np.asarray(cache), np.asarray(selected)


@pytest.mark.sampled(3)
@CACHE_TYPES
def test_plain_jax_selects_the_best_and_of_equals_the_earliest(dtype):
    step = SelectionStep.make(MIX, dtype=dtype)
    np.testing.assert_array_equal(run(step, tiled.select_tokens)[1], step.expected(NUM_SELECTED))


@needs_native
@each_isa
@CACHE_TYPES
def test_the_native_kernel_selects_the_same_and_leaves_the_same_cache(isa, dtype):  # noqa: F811
    step = SelectionStep.make(MIX, dtype=dtype)
    cache, selected = run(step, select_tokens)
    np.testing.assert_array_equal(selected, step.expected(NUM_SELECTED))
    np.testing.assert_array_equal(cache.view(np.uint8), run(step, tiled.select_tokens)[0].view(np.uint8))


@needs_native
def test_contexts_of_several_tasks():
    step = SelectionStep.make([(5000, 3), (2040, 1), (2000, 60)])
    np.testing.assert_array_equal(run(step, select_tokens, 900)[1], step.expected(900))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("always", [(2, 3), (0, NUM_SELECTED), (1, 0)], ids=str)
@pytest.mark.parametrize("select", [tiled.select_tokens, pytest.param(select_tokens, marks=needs_native)])
def test_the_first_and_last_tokens_of_a_context_are_always_selected(select, always):
    step = SelectionStep.make(MIX)
    np.testing.assert_array_equal(run(step, select, always=always)[1], step.expected(NUM_SELECTED, always))


@needs_native
def test_more_tokens_than_are_selected_are_refused():
    with pytest.raises(Exception, match="more tokens are always selected than are selected"):
        run(SelectionStep.make(MIX), select_tokens, always=(1, NUM_SELECTED))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("num_selected", [1, 400, 1000])
def test_selections_of_one_token_and_of_more_than_there_are(num_selected):
    step = SelectionStep.make([(40, 3), (399, 1), (400, 1)])
    for select in (tiled.select_tokens, select_tokens):
        np.testing.assert_array_equal(run(step, select, num_selected)[1], step.expected(num_selected))


@pytest.mark.slow
@pytest.mark.parametrize("select", [tiled.select_tokens, pytest.param(select_tokens, marks=needs_native)])
def test_real_scores_select_the_same_regardless_of_the_batch(select):
    """Alone and in chunks, with numbers whose sums depend on their order."""
    rng = np.random.default_rng(1)
    step = SelectionStep.make([(90, 1), (50, 24), (0, 5)])
    real = dataclasses.replace(step, q=rng.standard_normal(step.q.shape).astype(np.float32))
    _, together = run(real, select)
    starts = real.operands.batch.query_start_loc
    for r, chunks in ((0, [1]), (1, [16, 8])):
        cache, begin, parts = real.operands.kv_cache, 0, []
        for size in chunks:
            cache, selected = run(real.part(r, begin, begin + size, cache), select)
            parts.append(selected)
            begin += size
        np.testing.assert_array_equal(np.concatenate(parts), together[starts[r] : starts[r + 1]])


@pytest.mark.parametrize("always", [(0, 0), (2, 3)], ids=str)
def test_whole_sequences_select_as_the_cache_does(always):
    step = SelectionStep.make([(0, 40), (0, 23)])
    starts, num_tokens = step.operands.batch.query_start_loc, len(step.q)
    request = np.searchsorted(starts[1:3], np.arange(num_tokens), side="right")
    token = np.arange(num_tokens)
    visible = (request[:, None] == request) & (token[:, None] >= token)
    operands = (step.q, step.weights, step.operands.entries, jnp.asarray(visible))
    chosen = select_from_whole_sequences(*operands, num_selected=NUM_SELECTED, always=always)
    for row, selected in enumerate(step.expected(NUM_SELECTED, always)[: starts[2]]):
        first = starts[request[row]]
        np.testing.assert_array_equal(np.flatnonzero(chosen[row]), first + selected[selected >= 0])


def test_a_token_takes_one_key_in_the_cache():
    assert index_cache_layout(16, 128, jnp.bfloat16).shape == (16, 128)
    assert index_cache_layout(16, 128, jnp.int8).shape == (16, 132)
