"""Attention on TPU against dense attention in float64: JAX's kernel, in an interpreter with races, and the rest."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxis.config.attention_span import AttentionSpan
from jaxis.kernels.batch import Batch
from jaxis.kernels.ragged_paged_attention import tpu, tpu_layout
from tests.kernels.tpu_attention import make_interpretable, strict_interpreter
from tests.support.attention_steps import BFLOAT16, Step, make_step, with_cache_type

SINKS = np.array([-3.0, 0.5, 2.0, 30.0], np.float32)
# Decodes; prefills that are short, long, in the middle of a sequence, and of one token; and no token at all.
MIX = [(400, 1), (7, 1), (127, 1), (0, 13), (140, 21), (5, 0), (31, 1), (16, 16)]
PADDING = {"pad_tokens": 3, "pad_requests": 2}


@functools.cache
def jitted(options: tuple[tuple[str, Any], ...]) -> jax.stages.Wrapped:
    return jax.jit(functools.partial(tpu.ragged_paged_attention, **dict(options)))


def part_of(step: Step, first: np.ndarray, stop: np.ndarray, q: np.ndarray) -> tuple[Any, ...]:
    """The operands of a step that computes these tokens of each request, all of them as prefills."""
    counts = np.subtract(stop, first)
    starts = np.cumsum(np.pad(counts, (1, len(step.seq_lens) - len(counts))), dtype=np.int32)
    kv = [np.zeros((len(q), *step.keys[0].shape[1:]), q.dtype) for _ in range(2)]
    positions = np.zeros(len(q), np.int32)
    for r, (begin, end) in enumerate(zip(first, stop, strict=True)):
        rows = slice(starts[r], starts[r + 1])
        positions[rows] = np.arange(begin, end)
        kv[0][rows], kv[1][rows] = step.keys[r][begin:end], step.values[r][begin:end]
    seq_lens = np.zeros_like(step.seq_lens)
    seq_lens[: len(stop)] = stop
    distribution = np.array([0, 0, len(stop)], np.int32)
    return q, *kv, Batch(seq_lens, step.block_tables, starts, distribution, positions)


def run(step: Step, cache_type: type, sinks: np.ndarray | None = None, **options: Any) -> tuple[jax.Array, np.ndarray]:
    """Writes the histories into a cache of NaN, then runs the step: the cache, and the output."""
    block_size, num_kv_heads, head_dim = step.kv_cache.shape[1], step.keys[0].shape[1], step.q.shape[-1]
    layout = tpu_layout.kv_cache_layout(block_size, num_kv_heads, head_dim, cache_type)
    # Bytes of 255 are NaN in any type of floats.
    cache = np.full(len(step.kv_cache) * layout.block_bytes, 255, np.uint8).view(layout.dtype)
    cache = jnp.asarray(cache.reshape(-1, *layout.shape))
    attend = jitted((("scale", head_dim**-0.5), ("block_size", block_size), *options.items()))
    ends = step.seq_lens[: len(step.keys)]
    begins = ends - np.diff(step.query_start_loc)[: len(ends)]
    no_queries = np.zeros((max(1, begins.sum()), *step.q.shape[1:]), step.q.dtype)
    parts = [part_of(step, 0 * begins, begins, no_queries), part_of(step, begins, ends, step.q)]
    parts[1][-1].request_distribution[:] = step.request_distribution
    for q, k, v, batch in parts:
        cache, out = attend(*jax.tree.map(jnp.asarray, (q, k, v, cache, batch)), sinks=sinks)
    return cache, np.asarray(out)


def check(step: Step, cache_type: type, atol: float, **options: Any) -> None:
    _, out = run(step, cache_type, **options)
    assert np.isfinite(out.astype(np.float32)).all()
    if step.q.dtype != cache_type:
        # The step's own cache is not looked at.
        step = with_cache_type(dataclasses.replace(step, kv_cache=step.kv_cache[:0]), cache_type)
    expected = step.expected(step.q.shape[-1] ** -0.5, **options)
    np.testing.assert_allclose(out[: step.num_tokens].astype(np.float64), expected, rtol=0, atol=atol)


OFTEN = {
    "bfloat16, 64, sinks and window": (
        {"head_dim": 64, "dtype": BFLOAT16, "num_kv_heads": 1},
        BFLOAT16,
        2e-2,
        {"span": AttentionSpan(20), "sinks": SINKS},
    ),
    "int8, 64, blocks of 64": ({"block_size": 64}, np.int8, 1e-5, {}),
    "int8, 128, chunks and soft cap": (
        {"head_dim": 128},
        np.int8,
        1e-5,
        {"span": AttentionSpan(None, 24), "soft_cap": 3.0},
    ),
}
CASES = OFTEN | {
    "float32, 32, window and chunks": ({"head_dim": 32}, np.float32, 1e-5, {"span": AttentionSpan(7, 16)}),
    "float32 with a bfloat16 cache, 80": ({"head_dim": 80}, BFLOAT16, 1e-2, {}),
    "float32, 128, blocks of 8": ({"head_dim": 128, "block_size": 8}, np.float32, 1e-5, {}),
    "bfloat16, 256": ({"head_dim": 256, "dtype": BFLOAT16}, BFLOAT16, 2e-2, {}),
    "int8 of bfloat16, 96": ({"head_dim": 96, "dtype": BFLOAT16}, np.int8, 2e-2, {}),
    # A number just between two may become either.
    "int8, 256, sinks": ({"head_dim": 256}, np.int8, 1e-3, {"sinks": SINKS}),
}


@pytest.mark.parametrize(
    "case", [case if case in OFTEN else pytest.param(case, marks=pytest.mark.slow) for case in CASES]
)
def test_what_the_kernel_does_not_take_equals_dense_attention(case):
    sizes, cache_type, atol, options = CASES[case]
    check(make_step(MIX, **PADDING, **sizes), cache_type, atol, **options)


def test_tokens_may_see_later_tokens():
    check(make_step([(0, 20), (0, 7)]), np.float32, 1e-5, span=AttentionSpan(lookahead=None))


def test_without_keys_and_values_the_cache_is_read_as_it_is():
    """As by a layer that attends to what another one cached in this step."""
    step = make_step([(50, 1), (3, 9), (20, 30)])
    written, expected = run(step, np.float32)
    attend = jitted((("scale", step.q.shape[-1] ** -0.5), ("block_size", 16)))
    cache, out = attend(step.q, None, None, written, step.batch)
    np.testing.assert_array_equal(out, expected)
    np.testing.assert_array_equal(cache, written)


KERNEL_SIZES = {"num_heads": 8, "num_kv_heads": 2, "dtype": BFLOAT16}


@pytest.fixture
def interpreter(monkeypatch):
    """Several blocks of pages and of queries; the interpreter knows only as many queries as heads of a group."""
    make_interpretable(monkeypatch)
    monkeypatch.setattr(tpu, "MOST_PAGES", 4)
    monkeypatch.setattr(tpu, "MOST_QUERIES", 4)
    jitted.cache_clear()
    with strict_interpreter():
        yield
    jitted.cache_clear()


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize(
    ("requests", "head_dim", "soft_cap"),
    [
        ([(20, 1), (0, 6)], 128, 3.0),
        pytest.param([(140, 1), (7, 1), (5, 0), (0, 13), (30, 5), (5, 0)], 80, None, marks=pytest.mark.slow),
        pytest.param([(127, 1), (0, 0), (128, 1), (31, 1)], 128, None, marks=pytest.mark.slow),
        pytest.param([(9, 1)], 128, None, marks=pytest.mark.slow),
    ],
)
def test_jaxs_kernel_equals_dense_attention(requests, head_dim, soft_cap):
    check(make_step(requests, head_dim=head_dim, **PADDING, **KERNEL_SIZES), BFLOAT16, 2e-2, soft_cap=soft_cap)


@pytest.mark.slow
@pytest.mark.usefixtures("interpreter")
def test_jaxs_kernel_ends_without_tokens():
    """It has nothing to wait for what it began to read."""
    _, out = run(make_step([(5, 0), (0, 0)], head_dim=128, pad_tokens=2, **KERNEL_SIZES), BFLOAT16)
    np.testing.assert_array_equal(out, 0)


def kernel_takes(head_dim=128, num_kv_heads=8, dtype=jnp.bfloat16, cache_type=jnp.bfloat16, tables=(64, 2560)):
    layout = tpu_layout.kv_cache_layout(16, num_kv_heads, head_dim, cache_type)
    q = jax.ShapeDtypeStruct((64, 64, tpu_layout.padded_size(head_dim)), dtype)
    cache = jax.ShapeDtypeStruct((4096, *layout.shape), cache_type)
    return tpu.supports(q, cache, jax.ShapeDtypeStruct(tables, jnp.int32))


def test_which_heads_types_and_tables_jaxs_kernel_takes():
    assert kernel_takes()
    assert kernel_takes(head_dim=80, num_kv_heads=1)
    assert not kernel_takes(head_dim=64)
    assert not kernel_takes(head_dim=256)
    assert not kernel_takes(num_kv_heads=10)
    assert not kernel_takes(dtype=jnp.float32, cache_type=jnp.float32)
    assert not kernel_takes(cache_type=jnp.int8)
    # 1 MiB of scalars.
    assert not kernel_takes(tables=(64, 4096))


@pytest.mark.parametrize(
    ("block_size", "head_dim", "dtype", "shape"),
    [
        (16, 64, jnp.bfloat16, (16, 3, 128)),
        (16, 80, jnp.bfloat16, (16, 6, 128)),
        (16, 256, jnp.float32, (16, 6, 256)),
        (16, 64, jnp.int8, (17, 3, 128)),
        (16, 128, jnp.int8, (17, 6, 128)),
        (128, 64, jnp.int8, (136, 3, 128)),
    ],
)
def test_a_cache_is_whole_rows_of_128_lanes(block_size, head_dim, dtype, shape):
    assert tpu_layout.kv_cache_layout(block_size, 3, head_dim, dtype).shape == shape
