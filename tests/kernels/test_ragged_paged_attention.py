"""Each implementation against dense attention, one request at a time, in float64 numpy."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxis.config.attention_span import AttentionSpan
from jaxis.kernels.ragged_paged_attention import blockwise, reference
from jaxis.kernels.ragged_paged_attention import ragged_paged_attention as write_and_attend
from jaxis.kernels.ragged_paged_attention.layout import write_kv_cache
from tests.support.attention_steps import MIX, Step, make_step, paged, with_cache_type
from tests.support.quick_rows import quick_rows

IMPLEMENTATIONS = {"reference": reference.ragged_paged_attention, "blockwise": blockwise.ragged_paged_attention}
implementations = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
# What mixes do not show of the definition, the slow tests do.
blockwise_often = pytest.mark.parametrize(
    "implementation", [pytest.param("reference", marks=pytest.mark.slow), "blockwise"]
)


@functools.cache
def jitted(implementation: str) -> jax.stages.Wrapped:
    return jax.jit(IMPLEMENTATIONS[implementation], static_argnames=("scale", "span", "soft_cap"))


def check(implementation: str, step: Step, *, atol: float = 2e-5, **options: Any) -> None:
    scale = step.q.shape[-1] ** -0.5
    out = jitted(implementation)(*step.operands, scale=scale, **options)
    assert out.shape == step.q.shape
    assert out.dtype == step.q.dtype
    rows = np.asarray(out, np.float64)
    assert np.isfinite(rows).all()
    np.testing.assert_allclose(rows[: step.num_tokens], step.expected(scale, **options), rtol=0, atol=atol)


@pytest.mark.sampled(4)
@implementations
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(2, 2, 64), (4, 2, 80), (8, 1, 128)], ids=str)
def test_a_mix_of_decodes_and_prefills_equals_dense_attention(implementation, num_heads, num_kv_heads, head_dim):
    step = make_step(
        MIX, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, pad_tokens=11, pad_requests=3
    )
    check(implementation, step)


@pytest.mark.sampled(3)
@blockwise_often
@pytest.mark.parametrize("window", quick_rows([1, 16, 256, 300], [16, 300]))
def test_sliding_windows_shorter_equal_and_longer_than_a_chunk(implementation, window):
    check(implementation, make_step([(600, 1), (3, 1), (0, 20), (530, 40), (0, 1)]), span=AttentionSpan(window))


@pytest.mark.sampled(6)
@blockwise_often
@pytest.mark.parametrize(("window", "lookahead"), [(None, None), (None, 7), (40, 39), (260, None)])
def test_tokens_after_a_token(implementation, window, lookahead):
    whole = make_step([(0, 1), (0, 300), (0, 20), (0, 0), (0, 270), (0, 1)], pad_tokens=5, pad_requests=1)
    check(implementation, whole, span=AttentionSpan(window, lookahead=lookahead))


@pytest.mark.sampled(6)
@blockwise_often
@pytest.mark.parametrize("chunk", quick_rows([1, 24, 256, 300], [1, 24]))
def test_a_token_sees_only_its_own_chunk(implementation, chunk):
    step = make_step([(600, 1), (255, 1), (256, 1), (3, 1), (0, 90), (530, 80), (0, 1)])
    check(implementation, step, span=AttentionSpan(None, chunk))
    check(implementation, step, span=AttentionSpan(20, chunk))


@blockwise_often
def test_soft_cap_bounds_the_scores(implementation):
    step = make_step(MIX)
    step.q *= 8
    check(implementation, step, soft_cap=3.0, atol=5e-5)


@pytest.mark.sampled(3)
@blockwise_often
@pytest.mark.parametrize(
    "requests",
    [
        [(20, 1)],
        [(9, 1), (8, 0), (7, 0)],
        [(9, 0), (8, 0), (7, 1)],
        [(1, 64), (0, 65), (0, 127)],
        [(40, 1)] * 9,
    ],
    ids=str,
)
def test_extreme_steps(implementation, requests):
    """One token, fewer tokens than requests, whole tiles, only decodes, only prefills."""
    check(implementation, make_step(requests))


@implementations
def test_a_step_without_requests_is_finite(implementation):
    step = make_step([(0, 0)], pad_tokens=8, pad_requests=3, max_blocks=2)
    step.request_distribution[:] = 0
    assert np.isfinite(np.asarray(jitted(implementation)(*step.operands, scale=1.0))).all()


@pytest.mark.sampled
@blockwise_often
def test_sinks_take_their_share(implementation):
    sinks = np.array([-3.0, 0.5, 2.0, 30.0], np.float32)
    step = make_step(MIX, pad_tokens=3, pad_requests=1)
    check(implementation, step, sinks=sinks)
    check(implementation, step, sinks=sinks, span=AttentionSpan(9))


@pytest.mark.sampled
@implementations
@pytest.mark.parametrize("extent", [9, 300])
def test_biases_by_distance_and_sinks_of_each_token(implementation, extent):
    step = make_step(MIX, pad_tokens=3, pad_requests=1)
    rng = np.random.default_rng(extent)
    bias, sinks = (rng.standard_normal((*step.q.shape[:2], *rest)).astype(np.float32) for rest in ((extent,), ()))
    check(implementation, step, bias=bias)
    check(implementation, step, bias=bias, sinks=sinks, soft_cap=3.0, span=AttentionSpan(17))
    check(implementation, step, bias=bias, span=AttentionSpan(None, lookahead=7))


@implementations
def test_int8_cache(implementation):
    check(implementation, with_cache_type(make_step(MIX, pad_tokens=3, pad_requests=1), np.int8))


@blockwise_often
def test_bfloat16(implementation):
    check(implementation, make_step(MIX, dtype=ml_dtypes.bfloat16, pad_tokens=3), atol=2e-2)


@settings(max_examples=12, deadline=None)
@given(
    # The number of requests and the padded sizes are fixed, so that one compiled program serves all examples.
    st.lists(st.tuples(st.integers(0, 300), st.integers(0, 23)), min_size=6, max_size=6),
    st.integers(0, 2**32 - 1),
)
def test_random_mixes_equal_dense_attention(requests, seed):
    requests.sort(key=lambda request: request[1] != 1)
    pad_tokens = 6 * 23 - sum(queries for _, queries in requests)
    step = make_step(requests, pad_tokens=pad_tokens, max_blocks=21, num_heads=2, num_kv_heads=1, seed=seed)
    step.kv_cache = np.concatenate([step.kv_cache, np.full((140, *step.kv_cache.shape[1:]), np.nan, np.float32)])[:140]
    for implementation in IMPLEMENTATIONS:
        check(implementation, step, span=AttentionSpan(100))


def test_the_cache_is_written_at_exactly_the_steps_own_slots():
    requests = [(40, 1), (0, 13), (16, 5), (9, 0)]
    step = make_step(requests, pad_tokens=4, pad_requests=2)
    rng = np.random.default_rng(1)
    k, v = rng.standard_normal((2, len(step.q), 2, 64)).astype(np.float32)
    positions = np.concatenate([np.arange(h, h + n) for h, n in requests] + [np.zeros(4)]).astype(np.int32)
    expected = step.kv_cache.copy()
    for r in range(len(requests)):
        for row in range(step.query_start_loc[r], step.query_start_loc[r + 1]):
            slot = expected[step.block_tables[r, positions[row] // 16], positions[row] % 16]
            slot[0::2], slot[1::2] = k[row], v[row]
    q, cache, batch = step.operands
    np.testing.assert_array_equal(batch.positions, positions)
    written = jax.jit(write_kv_cache)(cache, jnp.asarray(k), jnp.asarray(v), batch)
    np.testing.assert_array_equal(written, expected)

    attend = jax.jit(functools.partial(write_and_attend, scale=0.125))
    cache, out = attend(q, jnp.asarray(k), jnp.asarray(v), paged(step.kv_cache), batch)
    np.testing.assert_array_equal(cache.array, expected)
    for r, (history, queries) in enumerate(requests):
        rows = slice(step.query_start_loc[r], step.query_start_loc[r + 1])
        step.keys[r][history : history + queries], step.values[r][history : history + queries] = k[rows], v[rows]
    np.testing.assert_allclose(out[: step.num_tokens], step.expected(0.125), rtol=0, atol=2e-5)
