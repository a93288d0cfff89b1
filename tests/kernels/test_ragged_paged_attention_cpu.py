"""The native kernel, on every instruction set: against dense attention, and against itself in other batches."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import os
import subprocess
import sys
from typing import Any, ClassVar

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxis.config.attention_span import AttentionSpan
from jaxis.kernels import native
from jaxis.kernels.batch import Batch
from jaxis.kernels.ragged_paged_attention import kv_cache_layout, ragged_paged_attention
from tests.support.attention_steps import BFLOAT16, MIX, Step, alone, make_step, paged, with_cache_type
from tests.support.isa import each_isa, isa, library_for  # noqa: F401 (isa is a fixture)

pytestmark = pytest.mark.skipif(native.library() is None, reason="the native library is not built")

CACHE_TYPES = [np.float32, BFLOAT16, np.int8]
cache_types = pytest.mark.parametrize("dtype", CACHE_TYPES, ids=["float32", "bfloat16", "int8"])


def blocked(kv_cache: np.ndarray, head_dim: int) -> np.ndarray:
    """A cache in the standard layout -> in the native kernel's, whose heads are whole tiles."""
    num_blocks, block_size, combined, _ = kv_cache.shape
    entries = kv_cache.reshape(num_blocks, block_size, combined // 2, 2, -1).transpose(3, 0, 2, 1, 4)
    keys, values = np.pad(entries[..., :head_dim], [(0, 0)] * 4 + [(0, -head_dim % 16)])
    keys = keys.reshape(*keys.shape[:2], block_size // 16, 16, -1).swapaxes(-1, -2)
    scales = [np.ascontiguousarray(part) for part in entries[..., head_dim:]]
    parts = [part.reshape(num_blocks, combined // 2, -1) for part in (keys, values, *scales)]
    return np.concatenate(parts, axis=-1)


@dataclasses.dataclass(frozen=True)
class Operands:
    """What the public function takes: the cache is as it was before the step."""

    q: np.ndarray
    k: np.ndarray | None
    v: np.ndarray | None
    kv_cache: np.ndarray
    batch: Batch

    @classmethod
    def of(cls, step: Step, dtype: type) -> Operands:
        """From a step with a float32 cache, in which its own tokens stand already: they are taken out."""
        num_tokens, num_kv_heads, head_dim = len(step.q), step.keys[0].shape[1], step.q.shape[2]
        block_size = step.kv_cache.shape[1]
        k, v = np.zeros((2, num_tokens, num_kv_heads, head_dim), np.float32)
        before = step.kv_cache.copy()
        for r, (keys, values) in enumerate(zip(step.keys, step.values, strict=True)):
            rows = slice(step.query_start_loc[r], step.query_start_loc[r + 1])
            own = np.arange(step.seq_lens[r] - (rows.stop - rows.start), step.seq_lens[r])
            k[rows], v[rows] = keys[own], values[own]
            before[step.block_tables[r, own // block_size], own % block_size] = np.nan
        before = with_cache_type(dataclasses.replace(step, kv_cache=before), dtype).kv_cache
        return cls(step.q, k, v, blocked(before, head_dim), step.batch)

    def run(self, **options: Any) -> tuple[np.ndarray, np.ndarray]:
        """The updated cache, and the output."""
        terms = {name: options.pop(name, None) for name in ("sinks", "bias")}
        options.setdefault("scale", self.q.shape[-1] ** -0.5)
        operands = (self.q, self.k, self.v, paged(self.kv_cache, "native"), self.batch)
        attend = jitted(native.isa(), tuple(options.items()))
        cache, out = attend(*operands, **terms)
        return np.asarray(cache.array), np.asarray(out)


@functools.cache
def jitted(isa: str, options: tuple[tuple[str, Any], ...]) -> jax.stages.Wrapped:  # noqa: F811
    """A program of its own for each instruction set: it names the kernel."""
    return jax.jit(functools.partial(ragged_paged_attention, **dict(options)))


def check(step: Step, dtype: type = np.float32, *, atol: float = 2e-5, **options: Any) -> None:
    """The kernel's output is dense attention's to the keys and values as the cache has them; the cache is as it was
    but for the step's tokens."""
    before = Operands.of(step, dtype)
    after = with_cache_type(step, dtype)
    cache, out = before.run(**options)
    assert np.isfinite(out).all()
    expected = after.expected(step.q.shape[-1] ** -0.5, **options)
    np.testing.assert_allclose(out[: step.num_tokens], expected, rtol=0, atol=atol)
    written = blocked(after.kv_cache, step.q.shape[2])
    np.testing.assert_array_equal(cache.view(np.uint8), written.view(np.uint8))


@pytest.mark.sampled(4)
@each_isa
@cache_types
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "block_size"),
    [
        (2, 2, 64, 16),
        (4, 2, 80, 16),
        (3, 1, 128, 32),
        (8, 2, 112, 16),
        (5, 1, 16, 48),
        (6, 1, 256, 16),
        (7, 1, 96, 64),
        (4, 2, 512, 16),
        (6, 2, 120, 16),
        (4, 1, 20, 32),
    ],
    ids=str,
)
def test_a_mix_equals_dense_attention(isa, dtype, num_heads, num_kv_heads, head_dim, block_size):  # noqa: F811
    step = make_step(
        MIX,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        pad_tokens=11,
        pad_requests=3,
    )
    check(step, dtype)


@pytest.mark.sampled(3)
@each_isa
@cache_types
def test_without_keys_and_values_the_cache_is_read_as_it_is(isa, dtype):  # noqa: F811
    """As by a layer that attends to what another one cached in this step."""
    step = make_step(MIX, head_dim=512, pad_tokens=3, pad_requests=2)
    written, expected = Operands.of(step, dtype).run()
    shared = dataclasses.replace(Operands.of(step, dtype), kv_cache=written, k=None, v=None)
    cache, out = shared.run()
    np.testing.assert_array_equal(out, expected)
    np.testing.assert_array_equal(cache.view(np.uint8), written.view(np.uint8))


@pytest.mark.sampled(3)
@each_isa
@cache_types
def test_windows_soft_caps_and_sinks(isa, dtype):  # noqa: F811
    step = make_step([(600, 1), (3, 1), (0, 20), (530, 40), (0, 1)], num_heads=8, num_kv_heads=1)
    sinks = np.linspace(-4, 4, 8, dtype=np.float32)
    check(step, dtype, span=AttentionSpan(1))
    check(step, dtype, span=AttentionSpan(37), soft_cap=3.0, sinks=sinks, atol=5e-5)
    check(step, dtype, span=AttentionSpan(256), sinks=sinks)
    check(step, dtype, soft_cap=3.0, atol=5e-5)


@pytest.mark.sampled(3)
@each_isa
@cache_types
def test_biases_by_distance_and_sinks_of_each_token(isa, dtype):  # noqa: F811
    step = make_step([(600, 1), (3, 1), (0, 20), (530, 40), (0, 1)], num_heads=8, num_kv_heads=2, pad_tokens=2)
    rng = np.random.default_rng(0)
    bias, sinks = (rng.standard_normal((*step.q.shape[:2], *rest)).astype(np.float32) for rest in ((300,), ()))
    check(step, dtype, bias=bias)
    check(step, dtype, bias=bias[..., :9], sinks=sinks, span=AttentionSpan(37), soft_cap=3.0, atol=5e-5)


@pytest.mark.sampled(4)
@each_isa
@cache_types
@pytest.mark.parametrize(("window", "lookahead"), [(None, None), (40, 39)])
def test_tokens_after_a_token(isa, dtype, window, lookahead):  # noqa: F811
    step = make_step([(0, 1), (0, 600), (0, 20), (0, 0), (0, 300)], num_heads=4, num_kv_heads=1, pad_tokens=3)
    check(step, dtype, span=AttentionSpan(window, lookahead=lookahead))


@pytest.mark.sampled(3)
@each_isa
@pytest.mark.parametrize("chunk", [1, 24, 256, 300])
def test_a_token_sees_only_its_own_chunk(isa, chunk):  # noqa: F811
    step = make_step([(600, 1), (255, 1), (256, 1), (3, 1), (0, 90), (530, 80), (0, 1)], num_heads=4, num_kv_heads=1)
    check(step, span=AttentionSpan(None, chunk))
    check(step, np.int8, span=AttentionSpan(20, chunk), sinks=np.zeros(4, np.float32))


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "requests",
    [
        [(20, 1)],
        [(0, 1)],
        [(255, 1)],
        [(256, 1)],
        [(9, 1), (8, 0), (7, 0)],
        [(9, 0), (8, 0), (7, 1)],
        [(9, 0), (8, 2)],
        [(1, 64), (0, 65), (0, 127)],
        [(40, 1)] * 9,
        [(0, 257)],
        [(509, 3), (1021, 11)],
    ],
    ids=str,
)
def test_extreme_steps(requests):
    check(make_step(requests))


def test_a_step_without_requests_is_finite():
    step = make_step([(0, 0)], pad_tokens=8, pad_requests=3, max_blocks=2)
    step.request_distribution[:] = 0
    check(step)


def test_bfloat16_activations():
    step = make_step(MIX, pad_tokens=3)
    operands = Operands.of(step, BFLOAT16)
    low_precision = [x.astype(BFLOAT16) for x in (operands.q, operands.k, operands.v)]
    _, out = dataclasses.replace(operands, q=low_precision[0], k=low_precision[1], v=low_precision[2]).run()
    assert out.dtype == BFLOAT16
    expected = with_cache_type(step, BFLOAT16).expected(step.q.shape[-1] ** -0.5)
    np.testing.assert_allclose(out[: step.num_tokens].astype(np.float32), expected, rtol=0, atol=2e-2)


@settings(max_examples=15, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 600), st.integers(0, 50)), min_size=1, max_size=6),
    st.sampled_from(CACHE_TYPES),
    st.sampled_from([None, 1, 100]),
    st.integers(0, 2**32 - 1),
)
def test_random_mixes_equal_dense_attention(requests, dtype, window, seed):
    check(make_step(requests, pad_tokens=3, num_heads=2, num_kv_heads=1, seed=seed), dtype, span=AttentionSpan(window))


class TestOneRequestsResultDependsOnNothingElse:
    """Bit for bit: with others, in chunks, token by token, whatever the threads."""

    OPTIONS: ClassVar[dict[str, Any]] = {
        "span": AttentionSpan(500),
        "soft_cap": 20.0,
        "sinks": np.array([0.5, -1.0, 2.0, 0.0], np.float32),
    }

    @pytest.mark.sampled(4)
    @each_isa
    @cache_types
    @pytest.mark.parametrize(("lookahead", "head_dim"), [(0, 64), (None, 64), (0, 12)])
    def test_alone_or_in_a_batch(self, isa, dtype, lookahead, head_dim):  # noqa: F811
        requests = [(700, 1), (130, 1), (0, 13), (300, 71), (31, 1)]
        if lookahead is None:  # whole sequences
            requests = [(0, history + queries) for history, queries in requests]
        step = make_step(requests, head_dim=head_dim, pad_tokens=5, pad_requests=2)
        together = Operands.of(step, dtype)
        options = self.OPTIONS | {"span": AttentionSpan(500, lookahead=lookahead)}
        _, expected = together.run(**options)
        for r in range(len(requests)):
            rows = slice(step.query_start_loc[r], step.query_start_loc[r + 1])
            part = dataclasses.replace(
                together,
                q=together.q[rows],
                k=together.k[rows],
                v=together.v[rows],
                batch=alone(step.seq_lens[r], rows.stop - rows.start, step.block_tables[r]),
            )
            np.testing.assert_array_equal(part.run(**options)[1], expected[rows])

    @pytest.mark.sampled(4)
    @each_isa
    @cache_types
    @pytest.mark.parametrize("chunk", [1, 7, 64, 256])
    def test_whole_or_in_chunks(self, isa, dtype, chunk):  # noqa: F811
        length = 40 if chunk == 1 else 600
        whole = Operands.of(make_step([(0, length)], max_blocks=40), dtype)
        expected_cache, expected = whole.run(**self.OPTIONS)
        cache, rows = whole.kv_cache, []
        for start in range(0, length, chunk):
            own = slice(start, min(start + chunk, length))
            size = own.stop - own.start
            part = dataclasses.replace(
                whole,
                q=whole.q[own],
                k=whole.k[own],
                v=whole.v[own],
                kv_cache=cache,
                batch=alone(own.stop, size, whole.batch.block_tables[0], is_decode=size == 1),
            )
            cache, out = part.run(**self.OPTIONS)
            rows.append(out)
        np.testing.assert_array_equal(cache.view(np.uint8), expected_cache.view(np.uint8))
        np.testing.assert_array_equal(np.concatenate(rows), expected)

    @pytest.mark.slow
    def test_on_any_number_of_threads(self):
        script = "from tests.kernels import test_ragged_paged_attention_cpu as t; print(t.digest())"
        for num_threads in (1, 3):
            environment = os.environ | {"NPROC": str(num_threads), "PYTHONPATH": os.pathsep.join(sys.path)}
            process = subprocess.run(
                [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False
            )
            assert process.returncode == 0, process.stderr
            assert process.stdout.split()[-1] == digest()


def digest() -> str:
    """Of the results of a step that is shared out differently among 1, 3 and 4 threads."""
    step = make_step([(5000, 1), (300, 1), (2100, 40), (0, 300)], num_heads=4, num_kv_heads=1)
    result = hashlib.sha256()
    for dtype in CACHE_TYPES:
        for array in Operands.of(step, dtype).run():
            result.update(array.tobytes())
    return result.hexdigest()


@pytest.mark.parametrize(
    ("block_size", "head_dim", "dtype", "is_native"),
    [
        (16, 64, np.float32, True),
        (32, 256, BFLOAT16, True),
        (16, 128, np.int8, True),
        (8, 64, np.float32, False),
        (16, 72, np.float32, True),
        (16, 72, np.int8, True),
        (16, 512, BFLOAT16, True),
        (16, 528, np.float32, False),
        (16, 64, np.float16, False),
    ],
)
def test_shapes_and_types_that_the_kernel_does_not_take_have_the_standard_layout(
    block_size, head_dim, dtype, is_native
):
    layout = kv_cache_layout(block_size, 2, head_dim, dtype)
    assert layout.kernels == ("native" if is_native else "any")
    stored_dim = head_dim + (-head_dim % 16 if is_native else 0)
    entry_bytes = stored_dim * np.dtype(dtype).itemsize + (4 if dtype == np.int8 else 0)
    assert layout.block_bytes == block_size * 2 * 2 * entry_bytes
