"""Latent attention against dense attention in float64: the definition, and what runs on any platform."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxis.kernels.latent_attention import latent_attention, layout, reference
from tests.support.attention_steps import BFLOAT16, MIX, Step, paged
from tests.support.latent_steps import SCALE, Operands, cached, expected, make_latent_step

VALUE_DIM = 32
cache_types = pytest.mark.parametrize("dtype", [np.float32, BFLOAT16, np.int8], ids=["float32", "bfloat16", "int8"])


def run(step: Step, dtype: type = np.float32) -> tuple[np.ndarray, np.ndarray]:
    """The updated cache and the output, by the implementation for the layout of any platform."""
    q, entries, kv_cache, batch = Operands.of(step, VALUE_DIM, dtype).all
    attend = jax.jit(functools.partial(latent_attention, value_dim=VALUE_DIM, scale=SCALE))
    cache, out = attend(q, entries, paged(kv_cache), batch)
    return np.asarray(cache.array), np.asarray(out)


@pytest.mark.sampled(4)
@cache_types
@pytest.mark.parametrize("block_size", [8, 16])
def test_a_mix_equals_dense_attention(dtype, block_size):
    step = make_latent_step(MIX, block_size=block_size, pad_tokens=11, pad_requests=3)
    cache, out = run(step, dtype)
    assert np.isfinite(out).all()
    # The weights have the precision of the values that they multiply.
    atol = 2e-2 if dtype == BFLOAT16 else 2e-5
    np.testing.assert_allclose(out[: step.num_tokens], expected(step, VALUE_DIM, dtype), rtol=0, atol=atol)
    decoded = [
        np.asarray(layout.decode(jnp.asarray(x), VALUE_DIM, step.q.shape[-1])).astype(np.float32)
        for x in (cache, cached(step.kv_cache, VALUE_DIM, dtype))
    ]
    np.testing.assert_allclose(*decoded, rtol=1e-6)


@pytest.mark.parametrize("dtype", [np.float32, np.int8], ids=["float32", "int8"])
def test_lanes_behind_an_entry_are_not_read(monkeypatch, dtype):
    """As those of TPUs."""
    monkeypatch.setattr(layout, "target_platform", lambda: "tpu")
    step = make_latent_step([(20, 1), (0, 7)])
    operands = Operands.of(step, VALUE_DIM, dtype)
    shape = layout.latent_cache_layout(16, step.q.shape[-1], dtype).shape
    assert shape == (16, 1, 128)
    garbage = np.full((len(operands.kv_cache), *shape), np.nan if dtype == np.float32 else 77, dtype)
    garbage[..., : operands.kv_cache.shape[-1]] = operands.kv_cache
    q, entries, _, batch = operands.all
    attend = jax.jit(functools.partial(latent_attention, value_dim=VALUE_DIM, scale=SCALE))
    _, out = attend(q, entries, paged(garbage), batch)
    np.testing.assert_allclose(out, expected(step, VALUE_DIM, dtype), rtol=0, atol=2e-5)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "requests",
    [[(20, 1)], [(0, 1)], [(127, 1)], [(128, 1)], [(9, 1), (8, 0), (7, 0)], [(9, 0), (8, 2)], [(0, 17), (0, 16)]],
    ids=str,
)
def test_extreme_steps(requests):
    step = make_latent_step(requests)
    np.testing.assert_allclose(run(step)[1], expected(step, VALUE_DIM), rtol=0, atol=2e-5)


def test_a_step_without_requests_is_finite():
    step = make_latent_step([(0, 0)], pad_tokens=8, pad_requests=3, max_blocks=2)
    step.request_distribution[:] = 0
    assert np.isfinite(run(step)[1]).all()


@pytest.mark.sampled
@cache_types
def test_the_definition_equals_dense_attention(dtype):
    step = make_latent_step(MIX, pad_tokens=3, pad_requests=1)
    kv_cache = cached(step.kv_cache, VALUE_DIM, dtype)
    attend = jax.jit(functools.partial(reference.latent_attention, value_dim=VALUE_DIM, scale=SCALE))
    out = attend(*jax.tree.map(jnp.asarray, (step.q, kv_cache, step.batch)))
    assert np.isfinite(out).all()
    np.testing.assert_allclose(out[: step.num_tokens], expected(step, VALUE_DIM, dtype), rtol=0, atol=2e-5)


@pytest.mark.slow
def test_a_latent_and_a_rope_key_of_very_different_sizes_both_survive_int8():
    entries = np.random.default_rng(0).standard_normal((7, 48)).astype(np.float32) * np.repeat([1e-3, 1e3], [32, 16])
    decoded = layout.decode(layout.encode(jnp.asarray(entries), jnp.int8, VALUE_DIM), VALUE_DIM, 48)
    np.testing.assert_allclose(decoded[:, :32], entries[:, :32], rtol=0, atol=4e-3 / 127)
    np.testing.assert_allclose(decoded[:, 32:], entries[:, 32:], rtol=0, atol=4e3 / 127)
