"""Latent attention by Triton kernels, interpreted, against dense attention in float64 numpy."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxis.kernels.latent_attention import gpu
from tests.support.attention_steps import BFLOAT16, MIX, Step
from tests.support.latent_steps import SCALE, cached, expected, make_latent_step

FEW = [(130, 1), (0, 13), (40, 30)]


def check(step: Step, value_dim: int, dtype: type = np.float32, atol: float = 1e-5) -> None:
    kv_cache = cached(step.kv_cache, value_dim, dtype)
    attend = functools.partial(gpu.latent_attention, value_dim=value_dim, scale=SCALE, interpret=True)
    out = np.asarray(jax.jit(attend)(*jax.tree.map(jnp.asarray, (step.q, kv_cache, step.batch))))
    assert out.shape == (*step.q.shape[:2], value_dim)
    assert out.dtype == step.q.dtype
    rows = out.astype(np.float64)
    assert not rows[step.num_tokens :].any()
    np.testing.assert_allclose(rows[: step.num_tokens], expected(step, value_dim, dtype), rtol=0, atol=atol)


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", [np.float32, np.int8], ids=["float32", "int8"])
def test_a_mix_equals_dense_attention(dtype):
    check(make_latent_step(FEW, num_heads=6, pad_tokens=11, pad_requests=3), 32, dtype)


def test_a_step_without_requests_is_finite():
    step = make_latent_step([(0, 0)], num_heads=6, pad_tokens=8, pad_requests=3, max_blocks=2)
    step.request_distribution[:] = 0
    check(step, 32)


@pytest.mark.slow
@pytest.mark.parametrize(("value_dim", "rope_dim"), [(512, 64), (256, 32), (48, 48), (32, 0)])
@pytest.mark.parametrize("num_heads", [3, 16, 40])
@pytest.mark.parametrize("dtype", [np.float32, BFLOAT16, np.int8], ids=["float32", "bfloat16", "int8"])
def test_sizes(value_dim, rope_dim, num_heads, dtype):
    if dtype == np.int8 and not rope_dim:
        pytest.skip("an int8 entry has a rope key")
    step = make_latent_step(FEW, head_dim=value_dim + rope_dim, num_heads=num_heads, pad_tokens=2)
    check(step, value_dim, dtype)


@pytest.mark.slow
def test_bfloat16():
    step = make_latent_step(MIX, head_dim=576, num_heads=16, dtype=BFLOAT16)
    step.q /= 8
    check(step, 512, BFLOAT16, atol=2e-2)
