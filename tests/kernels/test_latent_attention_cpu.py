"""The native kernel, on every instruction set: against dense attention, and against itself in other batches."""

from __future__ import annotations

import dataclasses
import functools

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxis.kernels import native
from jaxis.kernels.latent_attention import latent_attention, latent_cache_layout
from tests.support.attention_steps import BFLOAT16, MIX, Step, alone, paged
from tests.support.isa import each_isa, isa, library_for  # noqa: F401 (isa is a fixture)
from tests.support.latent_steps import SCALE, Operands, cached, expected, make_latent_step

pytestmark = pytest.mark.skipif(native.library() is None, reason="the native library is not built")

CACHE_TYPES = [np.float32, BFLOAT16, np.int8]
cache_types = pytest.mark.parametrize("dtype", CACHE_TYPES, ids=["float32", "bfloat16", "int8"])


@functools.cache
def jitted(isa: str, value_dim: int) -> jax.stages.Wrapped:  # noqa: F811
    """A program of its own for each instruction set: it names the kernel."""
    return jax.jit(functools.partial(latent_attention, value_dim=value_dim, scale=SCALE))


def run(operands: Operands, value_dim: int) -> tuple[np.ndarray, np.ndarray]:
    """The updated cache, in the layout of four axes, and the output."""
    q, entries, kv_cache, batch = operands.all
    blocked = paged(kv_cache.reshape(len(kv_cache), 1, -1), "native")
    cache, out = jitted(native.isa(), value_dim)(q, entries, blocked, batch)
    return np.asarray(cache.array).reshape(kv_cache.shape), np.asarray(out)


def check(step: Step, value_dim: int, dtype: type = np.float32, atol: float = 2e-5) -> None:
    """The output is dense attention's to the entries as the cache has them; the cache is as it was but for the step's
    tokens."""
    cache, out = run(Operands.of(step, value_dim, dtype), value_dim)
    assert np.isfinite(out).all()
    np.testing.assert_allclose(out[: step.num_tokens], expected(step, value_dim, dtype), rtol=0, atol=atol)
    np.testing.assert_array_equal(cache.view(np.uint8), cached(step.kv_cache, value_dim, dtype).view(np.uint8))


@pytest.mark.sampled(3)
@each_isa
@cache_types
@pytest.mark.parametrize(
    ("num_heads", "value_dim", "rope_dim", "block_size"),
    [(4, 32, 16, 16), (16, 64, 32, 8), (20, 48, 16, 32), (128, 16, 16, 16)],
    ids=str,
)
def test_a_mix_equals_dense_attention(isa, dtype, num_heads, value_dim, rope_dim, block_size):  # noqa: F811
    requests = MIX if num_heads < 100 else [(210, 1), (5, 3)]
    step = make_latent_step(
        requests,
        num_heads=num_heads,
        head_dim=value_dim + rope_dim,
        block_size=block_size,
        pad_tokens=11,
        pad_requests=3,
    )
    check(step, value_dim, dtype)


@each_isa
@cache_types
def test_entries_of_deepseeks_size(isa, dtype):  # noqa: F811
    # Scores have a spread of about 5.
    check(make_latent_step([(193, 1), (40, 5)], num_heads=16, head_dim=576), 512, dtype, atol=1e-4)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "requests",
    [
        *([(context, 1)] for context in (0, 1, 47, 48, 191, 192, 193)),
        [(9, 1), (8, 0), (7, 0)],
        [(9, 0), (8, 2)],
        [(1, 64), (0, 65), (0, 127)],
        [(40, 1)] * 9,
        [(190, 300)],
        [(509, 3), (1021, 11)],
    ],
    ids=str,
)
def test_extreme_steps(requests):
    check(make_latent_step(requests, num_heads=3), 32)


def test_a_step_without_requests_is_finite():
    step = make_latent_step([(0, 0)], pad_tokens=8, pad_requests=3, max_blocks=2)
    step.request_distribution[:] = 0
    assert np.isfinite(run(Operands.of(step, 32), 32)[1]).all()


def test_scores_far_apart():
    """Late tokens outweigh early ones, and the other way round, by more than float32 holds."""
    step = make_latent_step([(600, 1), (400, 30)], num_heads=2)
    for keys in step.keys:
        keys *= np.linspace(1, 60, len(keys), dtype=np.float32)[:, None, None]
    operands = Operands.of(step, 32)
    before = operands.kv_cache.copy()
    for r, keys in enumerate(step.keys):
        first = step.seq_lens[r] - (step.query_start_loc[r + 1] - step.query_start_loc[r])
        for position in range(first):
            before[step.block_tables[r, position // 16], position % 16] = keys[position]
    _, out = run(dataclasses.replace(operands, kv_cache=before), 32)
    np.testing.assert_allclose(out, expected(step, 32), rtol=1e-4, atol=1e-3)


@settings(max_examples=8, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 600), st.integers(0, 50)), min_size=1, max_size=6),
    st.sampled_from(CACHE_TYPES),
    st.integers(1, 40),
    st.integers(0, 2**32 - 1),
)
def test_random_mixes_equal_dense_attention(requests, dtype, num_heads, seed):
    check(make_latent_step(requests, pad_tokens=3, num_heads=num_heads, seed=seed), 32, dtype)


class TestOneRequestsResultDependsOnNothingElse:
    """Bit for bit: with others, in chunks, token by token, whatever the threads."""

    @pytest.mark.sampled(3)
    @each_isa
    @cache_types
    def test_alone_or_in_a_batch(self, isa, dtype):  # noqa: F811
        requests = [(700, 1), (130, 1), (0, 13), (300, 71), (31, 1)]
        step = make_latent_step(requests, num_heads=5, pad_tokens=5, pad_requests=2)
        together = Operands.of(step, 32, dtype)
        _, expected_rows = run(together, 32)
        for r in range(len(requests)):
            rows = slice(step.query_start_loc[r], step.query_start_loc[r + 1])
            part = dataclasses.replace(
                together,
                q=together.q[rows],
                entries=together.entries[rows],
                batch=alone(step.seq_lens[r], rows.stop - rows.start, step.block_tables[r]),
            )
            np.testing.assert_array_equal(run(part, 32)[1], expected_rows[rows])

    @pytest.mark.sampled(3)
    @each_isa
    @cache_types
    @pytest.mark.parametrize("chunk", [1, 7, 192])
    def test_whole_or_in_chunks(self, isa, dtype, chunk):  # noqa: F811
        length = 40 if chunk == 1 else 600
        whole = Operands.of(make_latent_step([(0, length)], num_heads=5, max_blocks=40), 32, dtype)
        expected_cache, expected_rows = run(whole, 32)
        cache, rows = whole.kv_cache, []
        for start in range(0, length, chunk):
            own = slice(start, min(start + chunk, length))
            size = own.stop - own.start
            part = dataclasses.replace(
                whole,
                q=whole.q[own],
                entries=whole.entries[own],
                kv_cache=cache,
                batch=alone(own.stop, size, whole.batch.block_tables[0], is_decode=size == 1),
            )
            cache, out = run(part, 32)
            rows.append(out)
        np.testing.assert_array_equal(cache.view(np.uint8), expected_cache.view(np.uint8))
        np.testing.assert_array_equal(np.concatenate(rows), expected_rows)


def test_bfloat16_activations():
    step = make_latent_step(MIX, pad_tokens=3)
    operands = Operands.of(step, 32, BFLOAT16)
    low_precision = dataclasses.replace(
        operands, q=operands.q.astype(BFLOAT16), entries=operands.entries.astype(BFLOAT16)
    )
    _, out = run(low_precision, 32)
    assert out.dtype == BFLOAT16
    np.testing.assert_allclose(
        out[: step.num_tokens].astype(np.float32), expected(step, 32, BFLOAT16), rtol=0, atol=2e-2
    )


@pytest.mark.parametrize(
    ("value_dim", "rope_dim", "dtype", "is_native"),
    [
        (512, 64, np.float32, True),
        (512, 64, BFLOAT16, True),
        (16, 16, np.int8, True),
        (24, 16, np.float32, False),
        (32, 8, np.float32, False),
        (512, 64, np.float16, False),
    ],
)
def test_shapes_and_types_that_the_kernel_does_not_take_have_the_standard_layout(value_dim, rope_dim, dtype, is_native):
    layout = latent_cache_layout(8, value_dim, rope_dim, dtype)
    assert layout.kernels == ("native" if is_native else "any")
    entry_bytes = (value_dim + rope_dim) * np.dtype(dtype).itemsize + (8 if dtype == np.int8 else 0)
    assert layout.block_bytes == 8 * entry_bytes
