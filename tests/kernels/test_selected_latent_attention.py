"""Latent attention to selected tokens, native and in plain JAX."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxis.kernels import native
from jaxis.kernels.latent_attention import latent_attention
from tests.support.attention_steps import BFLOAT16, alone, paged
from tests.support.isa import each_isa, isa  # noqa: F401 (isa is a fixture)
from tests.support.latent_steps import SCALE, Operands, expected, make_latent_step

needs_native = pytest.mark.skipif(native.library() is None, reason="the native library is not built")
REQUESTS = [(700, 1), (130, 1), (0, 13), (300, 71), (31, 1)]
NUM_SELECTED, VALUE_DIM = 40, 32


@functools.cache
def jitted(name):
    """A program of its own for each instruction set: it names the kernel."""
    del name
    return jax.jit(functools.partial(latent_attention, value_dim=VALUE_DIM, scale=SCALE))


def run(operands, selection, *, is_native, sinks=None):
    """The output; with the layout of the native kernel's cache or the standard one."""
    q, entries, kv_cache, batch = operands.all
    cache = paged(kv_cache.reshape(len(kv_cache), 1, -1), "native") if is_native else paged(kv_cache)
    selection = None if selection is None else jnp.asarray(selection)
    return np.asarray(jitted(native.isa())(q, entries, cache, batch, selection, sinks=sinks)[1])


def select_at_random(step, num_selected):
    """i32 [T, K]: all positions up to a token's own where they are at most K, else K of them or a few less."""
    rng = np.random.default_rng(2)
    selection = np.full((len(step.q), num_selected), -1, np.int32)
    for r in range(len(step.keys)):
        begin, end = step.query_start_loc[r], step.query_start_loc[r + 1]
        for row in range(begin, end):
            context = step.seq_lens[r] - (end - row) + 1
            few = num_selected - (row % 4 if context > num_selected else 0)
            chosen = np.sort(rng.permutation(context)[:few])
            selection[row, : len(chosen)] = chosen
    return selection


def masked(step, selection, sinks=None):
    """Dense attention in float64 of each query to its selected entries alone: [num_tokens, H, V]."""
    sinks = np.full(step.q.shape[1], -np.inf) if sinks is None else sinks
    rows = []
    for r, keys in enumerate(step.keys):
        for row in range(step.query_start_loc[r], step.query_start_loc[r + 1]):
            entries = keys[selection[row][selection[row] >= 0], 0].astype(np.float64)
            scores = step.q[row].astype(np.float64) @ entries.T * SCALE
            weights = np.exp(scores)
            rows.append(weights / (weights.sum(-1) + np.exp(sinks))[:, None] @ entries[:, :VALUE_DIM])
    return np.stack(rows)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("is_native", [False, pytest.param(True, marks=needs_native)])
@pytest.mark.parametrize("num_heads", [5, 60])
def test_only_selected_tokens_are_seen(is_native, num_heads):
    step = make_latent_step(REQUESTS, num_heads=num_heads, pad_tokens=5, pad_requests=2)
    selection = select_at_random(step, NUM_SELECTED)
    out = run(Operands.of(step, VALUE_DIM), selection, is_native=is_native)
    assert np.isfinite(out).all()
    np.testing.assert_allclose(out[: step.num_tokens], masked(step, selection), rtol=0, atol=2e-5)


@pytest.mark.parametrize("is_native", [False, pytest.param(True, marks=needs_native)])
@pytest.mark.parametrize("selects", [False, True])
def test_sinks_take_part_in_the_softmax(is_native, selects):
    step = make_latent_step(REQUESTS, num_heads=5, pad_tokens=5, pad_requests=2)
    selection = select_at_random(step, NUM_SELECTED if selects else 701)
    sinks = np.array([-40, -1, 0, 2, 50], np.float32)
    operands = Operands.of(step, VALUE_DIM)
    out = run(operands, selection if selects else None, is_native=is_native, sinks=sinks)
    wanted = masked(step, selection, sinks.astype(np.float64))
    np.testing.assert_allclose(out[: step.num_tokens], wanted, rtol=0, atol=2e-5)


@needs_native
@each_isa
@pytest.mark.parametrize("dtype", [np.float32, BFLOAT16, np.int8], ids=["float32", "bfloat16", "int8"])
def test_a_selection_of_everything_gives_the_bits_of_dense_attention(isa, dtype):  # noqa: F811
    step = make_latent_step(REQUESTS, num_heads=5, pad_tokens=5, pad_requests=2)
    operands = Operands.of(step, VALUE_DIM, dtype)
    dense = run(operands, None, is_native=True)
    np.testing.assert_array_equal(run(operands, select_at_random(step, 701), is_native=True), dense)
    # The first request's token sees one token less; all others see their whole contexts still.
    np.testing.assert_array_equal(run(operands, select_at_random(step, 700), is_native=True)[1:], dense[1:])
    np.testing.assert_allclose(dense[: step.num_tokens], expected(step, VALUE_DIM, dtype), rtol=0, atol=2e-5)


@pytest.mark.parametrize("is_native", [False, pytest.param(True, marks=needs_native)])
def test_a_requests_bits_do_not_depend_on_the_rest_of_the_batch(is_native):
    step = make_latent_step(REQUESTS, num_heads=5, pad_tokens=5, pad_requests=2)
    together, selection = Operands.of(step, VALUE_DIM), select_at_random(step, NUM_SELECTED)
    out = run(together, selection, is_native=is_native)
    for r in (0, 3):
        rows = slice(step.query_start_loc[r], step.query_start_loc[r + 1])
        size = rows.stop - rows.start
        part = dataclasses.replace(
            together,
            q=together.q[rows],
            entries=together.entries[rows],
            batch=alone(step.seq_lens[r], size, step.block_tables[r], is_decode=size == 1),
        )
        np.testing.assert_array_equal(run(part, selection[rows], is_native=is_native), out[rows])
