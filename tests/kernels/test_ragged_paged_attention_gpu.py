"""The Triton kernels of paged attention, interpreted, against dense attention in float64 numpy."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxis.config.attention_span import AttentionSpan
from jaxis.kernels.batch import Batch
from jaxis.kernels.ragged_paged_attention import gpu, gpu_decode, gpu_prefill
from tests.support.attention_steps import BFLOAT16, MIX, Step, make_step, with_cache_type


@functools.cache
def jitted() -> jax.stages.Wrapped:
    interpreted = functools.partial(gpu.ragged_paged_attention, interpret=True)
    return jax.jit(interpreted, static_argnames=("scale", "span", "soft_cap"))


def attend(step: Step, **options: Any) -> np.ndarray:
    return np.asarray(jitted()(*step.operands, **options))


def check(step: Step, *, atol: float = 1e-5, **options: Any) -> None:
    scale = step.q.shape[-1] ** -0.5
    out = attend(step, scale=scale, **options)
    assert out.shape == step.q.shape
    assert out.dtype == step.q.dtype
    rows = out.astype(np.float64)
    assert np.isfinite(rows).all()
    np.testing.assert_allclose(rows[: step.num_tokens], step.expected(scale, **options), rtol=0, atol=atol)


@pytest.mark.slow
def test_a_mix_of_decodes_and_prefills_equals_dense_attention():
    check(make_step(MIX, num_heads=6, pad_tokens=11, pad_requests=3))


def test_bfloat16_with_heads_of_128():
    requests = [(0, 1), (130, 1), (0, 13), (200, 71), (5, 0)]
    check(make_step(requests, head_dim=128, dtype=BFLOAT16, pad_tokens=3), atol=2e-2)


def test_int8_cache():
    step = make_step([(130, 1), (0, 13), (70, 40)], pad_tokens=3, pad_requests=1)
    check(with_cache_type(step, np.int8))


def test_windows_sinks_and_soft_cap():
    step = make_step([(600, 1), (3, 1), (0, 20), (530, 40), (0, 1)], num_heads=2)
    step.q *= 4
    sinks = np.array([-3.0, 2.0], np.float32)
    check(step, span=AttentionSpan(100), sinks=sinks, soft_cap=3.0, atol=3e-5)


def test_a_token_sees_only_its_own_chunk():
    step = make_step([(255, 1), (256, 1), (0, 90), (230, 80)], num_heads=2, num_kv_heads=1)
    check(step, span=AttentionSpan(None, 256))


@pytest.mark.slow
def test_a_request_gets_the_same_bits_regardless_of_the_batch():
    """Alone, and among others; decoded, with a context of several partitions, and prefilled in other chunks."""
    requests = [(1900, 1), (40, 1), (150, 70)]
    step = make_step(requests, num_heads=2, num_kv_heads=1, pad_tokens=8, pad_requests=1)
    together = attend(step, scale=0.125)
    np.testing.assert_allclose(together[:72], step.expected(0.125), rtol=0, atol=1e-5)

    def alone(request: int, history: int, begin: int, end: int) -> np.ndarray:
        """Rows [begin, end) of a request as a step of their own, that the request has some history before."""
        first = step.query_start_loc[request]
        part = dataclasses.replace(
            step,
            q=step.q[first + begin : first + end],
            seq_lens=np.array([history + end], np.int32),
            block_tables=step.block_tables[request : request + 1],
            query_start_loc=np.array([0, end - begin], np.int32),
            request_distribution=np.array([0, 0, 1], np.int32),
        )
        return attend(part, scale=0.125)

    np.testing.assert_array_equal(alone(0, 1900, 0, 1), together[:1])
    chunks = [alone(2, 150, 0, 35), alone(2, 150, 35, 70)]
    np.testing.assert_array_equal(np.concatenate(chunks), together[2:72])


def test_a_context_is_split_over_many_programs():
    step = make_step([(2300, 1), (2047, 2), (1000, 1)], num_heads=8, num_kv_heads=8, head_dim=16)
    assert gpu_decode.max_partitions(8) < 2300 / gpu_decode.MIN_PARTITION_TOKENS
    check(step)


@pytest.mark.parametrize("requests", [[(20, 1)], [(9, 0), (8, 0), (7, 1)]], ids=str)
def test_steps_of_one_token(requests):
    check(make_step(requests, num_heads=2))


def test_a_step_without_requests_is_finite():
    step = make_step([(0, 0)], pad_tokens=8, pad_requests=3, max_blocks=2)
    step.request_distribution[:] = 0
    assert np.isfinite(attend(step, scale=1.0)).all()


@pytest.mark.sampled
@pytest.mark.parametrize("tile_queries", [3, 64])
def test_each_query_of_a_prefill_is_in_one_tile(tile_queries):
    query_lens = np.array([1, 5, 0, 64, 1, 2, 129, 7], np.int32)  # the last is padding
    starts = np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32)
    batch = Batch(np.zeros(8), None, starts, np.array([0, 0, 7], np.int32), None)
    batch = jax.tree.map(jax.numpy.asarray, batch)
    request, first = np.asarray(gpu_prefill.prefill_tiles(batch, int(starts[-1]), tile_queries))
    rows = [
        (r, query)
        for r, begin in zip(request, first, strict=True)
        if r != gpu_prefill.NO_TILE
        for query in range(begin, min(begin + tile_queries, query_lens[r]))
    ]
    assert rows == [(r, query) for r in (1, 3, 5, 6) for query in range(query_lens[r])]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [np.float32, BFLOAT16, np.float16])
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim"),
    [(8, 4, 32), (4, 2, 80), (2, 2, 96), (10, 2, 128), (7, 1, 64), (71, 1, 64), (130, 1, 16), (4, 2, 256)],
    ids=str,
)
def test_head_sizes_and_groups(num_heads, num_kv_heads, head_dim, dtype):
    step = make_step(MIX, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, dtype=dtype, pad_tokens=5)
    check(step, atol=1e-5 if dtype == np.float32 else 2e-2)


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [64, 80, 256])
@pytest.mark.parametrize(("dtype", "cache"), [(np.float32, BFLOAT16), (BFLOAT16, np.float32), (BFLOAT16, np.int8)])
def test_caches_of_other_types(dtype, cache, head_dim):
    step = with_cache_type(make_step(MIX, head_dim=head_dim, pad_tokens=3, pad_requests=1), cache)
    step.q = step.q.astype(dtype)
    check(step, atol=1e-5 if dtype == np.float32 else 2e-2)


@pytest.mark.slow
@pytest.mark.parametrize("window", [1, 16, 64, 300])
@pytest.mark.parametrize("chunk", [None, 1, 24, 300])
def test_spans(window, chunk):
    step = make_step([(600, 1), (255, 1), (256, 1), (3, 1), (0, 90), (530, 80), (0, 1)], num_kv_heads=1)
    check(step, span=AttentionSpan(window, chunk))
    check(step, span=AttentionSpan(None, chunk), sinks=np.array([-3.0, 0.5, 2.0, 30.0], np.float32))


@pytest.mark.slow
@pytest.mark.parametrize("block_size", [1, 7, 128])
def test_block_sizes(block_size):
    check(make_step([(400, 1), (300, 9)], block_size=block_size, num_heads=2, num_kv_heads=1, max_blocks=701))


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(
    # The number of requests and the padded sizes are fixed, so that one compiled program serves all examples.
    st.lists(st.tuples(st.integers(0, 300), st.integers(0, 23)), min_size=6, max_size=6),
    st.integers(0, 2**32 - 1),
)
def test_random_mixes_equal_dense_attention(requests, seed):
    pad_tokens = 6 * 23 - sum(queries for _, queries in requests)
    step = make_step(requests, pad_tokens=pad_tokens, max_blocks=21, num_heads=2, num_kv_heads=1, seed=seed)
    step.kv_cache = np.concatenate([step.kv_cache, np.full((140, *step.kv_cache.shape[1:]), np.nan, np.float32)])[:140]
    check(step, span=AttentionSpan(100))
