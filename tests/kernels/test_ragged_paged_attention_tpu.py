"""The TPU kernels against dense attention in float64, in Pallas's interpreter, which reports races."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxis.config.attention_span import AttentionSpan
from jaxis.errors import ConfigError
from jaxis.kernels.ragged_paged_attention import tpu, tpu_layout, tpu_work_items
from tests.support.attention_steps import BFLOAT16, Step, make_step, with_cache_type
from tests.support.quick_rows import quick_rows
from tests.support.tpu_attention import TpuStep, assert_equal_caches, strict_interpreter, tpu_step

SINKS = np.array([-3.0, 0.5, 2.0, 30.0], np.float32)
# Decodes; prefills that are short, long, in the middle of a sequence, and of one token; and no token at all.
MIX = [(400, 1), (7, 1), (127, 1), (0, 13), (140, 21), (5, 0), (31, 1), (16, 16)]
SHORT_MIX = [(140, 1), (7, 1), (0, 13), (30, 5), (5, 0)]
PADDING = {"pad_tokens": 3, "pad_requests": 2}


@pytest.fixture(autouse=True)
def small_sizes(monkeypatch):
    """Some contexts are more chunks than there are buffers, and some prompts are several tiles."""
    monkeypatch.setattr(tpu, "MAX_CHUNK_TOKENS", 128)
    monkeypatch.setattr(tpu, "MAX_BUFFERS", 3)
    monkeypatch.setattr(tpu, "TILE_ROWS", 16)


@functools.cache
def jitted(options: tuple[tuple[str, Any], ...]) -> jax.stages.Wrapped:
    return jax.jit(functools.partial(tpu.ragged_paged_attention, **dict(options)))


def run(step: Step, cache_type: type, sinks: np.ndarray | None = None, **options: Any) -> tuple[TpuStep, Any, Any]:
    """The step as the kernels take it, the cache after it, and the output."""
    head_dim, dtype = step.q.shape[-1], step.q.dtype
    width = 64 if head_dim <= 64 else -(-head_dim // 128) * 128
    inputs = tpu_step(step, (step.keys, step.values), (width, width), cache_type)
    operands = (step.q, *(x.astype(dtype) for x in inputs.entries), inputs.kv_cache, *inputs.rest)
    with strict_interpreter():
        attend = jitted((("scale", head_dim**-0.5), *options.items()))
        cache, out = map(np.asarray, attend(*map(jnp.asarray, operands), sinks=sinks))
    return inputs, cache, out


def check(step: Step, cache_type: type, atol: float, **options: Any) -> None:
    inputs, cache, out = run(step, cache_type, **options)
    assert_equal_caches(cache, inputs.cache_after)
    assert np.isfinite(out.astype(np.float32)).all()
    if step.q.dtype != cache_type:
        # The step's own cache is not looked at.
        step = with_cache_type(dataclasses.replace(step, kv_cache=step.kv_cache[:0]), cache_type)
    expected = step.expected(step.q.shape[-1] ** -0.5, **options)
    np.testing.assert_allclose(out[: step.num_tokens].astype(np.float64), expected, rtol=0, atol=atol)


CASES = {
    "bfloat16, 64, sinks and window": (
        {"head_dim": 64, "dtype": BFLOAT16, "num_kv_heads": 1},
        BFLOAT16,
        2e-2,
        {"span": AttentionSpan(20), "sinks": SINKS},
    ),
    "int8, 128, chunks and soft cap": (
        {"head_dim": 128},
        np.int8,
        1e-5,
        {"span": AttentionSpan(None, 24), "soft_cap": 3.0},
    ),
}
MORE_CASES = {
    "float32, 128": ({"head_dim": 128}, np.float32, 1e-5, {}),
    "bfloat16, 128, heads not grouped": ({"head_dim": 128, "dtype": BFLOAT16, "num_kv_heads": 4}, BFLOAT16, 2e-2, {}),
    "bfloat16, 256": ({"head_dim": 256, "dtype": BFLOAT16}, BFLOAT16, 2e-2, {}),
    "bfloat16, 512, window": (
        {"head_dim": 512, "dtype": BFLOAT16, "num_kv_heads": 1},
        BFLOAT16,
        2e-2,
        {"span": AttentionSpan(20)},
    ),
    "float32, 64, sinks": ({"head_dim": 64}, np.float32, 1e-5, {"sinks": SINKS}),
    "float32 with a bfloat16 cache, 80": ({"head_dim": 80}, BFLOAT16, 1e-5, {}),
    "float32, 32, window and chunks": ({"head_dim": 32}, np.float32, 1e-5, {"span": AttentionSpan(7, 16)}),
    "float32, 256, window of a page": ({"head_dim": 256}, np.float32, 1e-5, {"span": AttentionSpan(16)}),
    "int8, 128": ({"head_dim": 128}, np.int8, 1e-5, {}),
    "int8, 256, sinks": ({"head_dim": 256}, np.int8, 1e-5, {"sinks": SINKS}),
    "int8 of bfloat16, 96": ({"head_dim": 96, "dtype": BFLOAT16}, np.int8, 2e-2, {}),
    "float32, blocks of 32": ({"head_dim": 64, "block_size": 32}, np.float32, 1e-5, {}),
    "int8, blocks of 64": ({"head_dim": 64, "block_size": 64}, np.int8, 1e-5, {}),
    "int8, blocks of 128": ({"head_dim": 64, "block_size": 128}, np.int8, 1e-5, {}),
}


def check_mix(requests: list[tuple[int, int]], case: str) -> None:
    sizes, cache_type, atol, options = (CASES | MORE_CASES)[case]
    check(make_step(requests, **PADDING, **sizes), cache_type, atol, **options)


@pytest.mark.slow
@pytest.mark.parametrize("case", quick_rows(CASES, ["bfloat16, 64, sinks and window"]))
def test_a_short_mix_of_decodes_and_prefills_equals_dense_attention(case):
    check_mix(SHORT_MIX, case)


@pytest.mark.slow
@pytest.mark.parametrize("case", [*CASES, *MORE_CASES])
def test_a_mix_of_decodes_and_prefills_equals_dense_attention(case):
    check_mix(MIX, case)


@pytest.mark.slow
def test_a_decode_with_heads_of_256_equals_dense_attention():
    check(make_step([(20, 1)], head_dim=256, num_heads=2, num_kv_heads=1), np.float32, 1e-5)


@pytest.mark.parametrize(
    "requests",
    [
        pytest.param([(20, 1)], marks=pytest.mark.slow),
        pytest.param([(0, 1)], marks=pytest.mark.slow),
        pytest.param([(9, 1), (8, 0), (7, 0)], marks=pytest.mark.slow),
        pytest.param([(128, 1), (126, 1), (127, 1), (255, 1), (256, 1)], marks=pytest.mark.slow),
        pytest.param([(1, 64), (0, 65), (120, 17)], marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_extreme_steps(requests):
    check(make_step(requests, num_heads=2, num_kv_heads=1), np.float32, 1e-5)


# The sizes of the steps below, so that they share a program for each span.
SIZES = {"num_heads": 2, "num_kv_heads": 1, "max_blocks": 9}
NUM_TOKENS, NUM_REQUESTS, NUM_BLOCKS = 48, 4, 32


def padded_step(requests: list[tuple[int, int]]) -> Step:
    pad_tokens = NUM_TOKENS - sum(queries for _, queries in requests)
    step = make_step(requests, pad_tokens=pad_tokens, pad_requests=NUM_REQUESTS - len(requests), **SIZES)
    step.kv_cache = np.full((NUM_BLOCKS, *step.kv_cache.shape[1:]), np.nan, np.float32)
    return step


@pytest.mark.slow
def test_a_step_without_requests_is_finite_and_changes_no_cache():
    step = padded_step([(0, 0)])
    step.request_distribution[:] = 0
    inputs, cache, out = run(step, np.float32)
    np.testing.assert_array_equal(cache, inputs.kv_cache)
    assert np.isfinite(out).all()


@pytest.mark.slow  # test_ragged_paged_attention.py has it of the definition
def test_without_keys_and_values_the_cache_is_read_as_it_is():
    """As by a layer that attends to what another one cached in this step."""
    step = padded_step([(50, 1), (3, 9), (20, 30)])
    inputs, written, expected = run(step, np.float32)
    with strict_interpreter():
        attend = jitted((("scale", step.q.shape[-1] ** -0.5),))
        cache, out = attend(step.q, None, None, jnp.asarray(written), *inputs.rest)
    np.testing.assert_array_equal(out, expected)
    np.testing.assert_array_equal(cache, written)


@pytest.mark.slow
def test_pages_before_a_window_are_not_read():
    """Their entries in the block table name blocks that are not there: to read one is an error."""
    step, span = padded_step([(140, 1), (96, 20)]), AttentionSpan(17)
    inputs = tpu_step(step, (step.keys, step.values), (64, 64), np.float32)
    inputs.rest[1][0, : (140 - 16) // 16] = inputs.rest[1][1, : (96 - 16) // 16] = 10**6
    with strict_interpreter():
        _, out = jitted((("scale", 0.1), ("span", span)))(step.q, *inputs.entries, inputs.kv_cache, *inputs.rest)
    np.testing.assert_allclose(out[: step.num_tokens], step.expected(0.1, span), rtol=0, atol=1e-5)


@pytest.mark.slow
def test_a_request_has_the_same_bits_regardless_of_the_batch():
    """A decode; and a prompt whole, in two steps or its last token alone, by itself or in rows behind others."""
    batch = padded_step([(50, 1), (3, 9), (20, 30)])
    _, _, together = run(batch, np.float32)

    def alone(r: int, history: int, num_queries: int) -> np.ndarray:
        step = padded_step([(history, num_queries)])
        first = batch.query_start_loc[r + 1] - (batch.seq_lens[r] - history)
        step.q[:num_queries] = batch.q[first : first + num_queries]
        step.keys, step.values = [batch.keys[r]], [batch.values[r]]
        return run(step, np.float32)[2][:num_queries]

    np.testing.assert_array_equal(together[:1], alone(0, 50, 1))
    np.testing.assert_array_equal(together[10:40], alone(2, 20, 30))
    np.testing.assert_array_equal(together[10:29], alone(2, 20, 19))
    np.testing.assert_array_equal(together[29:40], alone(2, 39, 11))
    np.testing.assert_array_equal(together[39:40], alone(2, 49, 1))


def test_work_items_are_in_the_order_of_requests():
    items = tpu_work_items.work_items(jnp.array([0, 2, 0, 3, 0]), 7)
    assert items.count == 5
    assert items.request[:5].tolist() == [1, 1, 3, 3, 3]
    assert items.nth[:5].tolist() == [0, 1, 0, 1, 2]


@pytest.mark.parametrize(
    ("head_dim", "dtype", "rows"),
    [
        *[(64, jnp.bfloat16, 16), (80, jnp.bfloat16, 32), (128, jnp.float32, 32), (256, jnp.bfloat16, 64)],
        *[(64, jnp.int8, 24), (128, jnp.int8, 40)],
    ],
)
def test_a_cache_is_whole_rows_of_128_lanes(head_dim, dtype, rows):
    page = tpu_layout.PageLayout.of_heads(16, head_dim, dtype)
    assert page.cache_layout(3, dtype, "kv_heads").shape == (3, rows, 128)
    assert tpu_layout.PageLayout.of_heads(1, head_dim, dtype).of_cache((5, 3, rows, 128)) == page


@pytest.mark.parametrize(("block_size", "dtype"), [(8, jnp.bfloat16), (48, jnp.bfloat16), (256, jnp.int8)])
def test_blocks_that_have_no_layout_are_refused(block_size, dtype):
    with pytest.raises(ConfigError, match=f"block_size={block_size}: on TPU"):
        tpu_layout.PageLayout.of_heads(block_size, 64, dtype).cache_layout(3, dtype, "kv_heads")
