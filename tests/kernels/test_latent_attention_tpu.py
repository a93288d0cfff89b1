"""Latent attention on TPU against dense attention in float64, in Pallas's interpreter, which reports races."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxis.kernels.latent_attention import tpu
from jaxis.kernels.ragged_paged_attention import tpu as paged
from tests.support.attention_steps import BFLOAT16, Step
from tests.support.latent_steps import SCALE, expected, make_latent_step, split
from tests.support.tpu_attention import assert_equal_caches, strict_interpreter, tpu_step

MIX = [(130, 1), (7, 1), (0, 9), (140, 5), (5, 0)]
CASES = [
    (np.float32, BFLOAT16, 160, 16, 1e-5),
    pytest.param(np.float32, np.float32, 32, 16, 1e-5, marks=pytest.mark.slow),
    pytest.param(np.float32, np.int8, 160, 16, 1e-5, marks=pytest.mark.slow),
    pytest.param(BFLOAT16, BFLOAT16, 512, 64, 2e-2, marks=pytest.mark.slow),
    pytest.param(BFLOAT16, np.int8, 512, 64, 4e-2, marks=pytest.mark.slow),
]


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "cache_type", "value_dim", "rope_dim", "atol"), CASES)
def test_a_mix_equals_dense_attention(monkeypatch, dtype, cache_type, value_dim, rope_dim, atol):
    monkeypatch.setattr(paged, "MAX_CHUNK_TOKENS", 128)
    monkeypatch.setattr(paged, "TILE_ROWS", 16)
    step = make_latent_step(MIX, head_dim=value_dim + rope_dim, dtype=dtype, pad_tokens=3, pad_requests=1)
    # Scores as large as those of a trained model, whatever the size of a head.
    step.q *= np.asarray(48**0.5 / (value_dim + rope_dim) ** 0.5, dtype)
    check(step, value_dim, cache_type, atol)


def test_a_step_without_requests_is_finite_and_changes_no_cache():
    step = make_latent_step([(0, 0)], head_dim=48, pad_tokens=8, pad_requests=3, max_blocks=2)
    step.request_distribution[:] = 0
    check(step, 32, np.float32, 1e-5)


def check(step: Step, value_dim: int, cache_type: type, atol: float) -> None:
    parts = tuple(zip(*(split(entries, value_dim) for entries in step.keys), strict=True))
    inputs = tpu_step(step, parts, (-(-value_dim // 128) * 128, 128), cache_type)
    entries = np.concatenate(inputs.entries, axis=-1)[:, 0].astype(step.q.dtype)
    attend = jax.jit(functools.partial(tpu.latent_attention, value_dim=value_dim, scale=SCALE))
    with strict_interpreter():
        cache, out = map(np.asarray, attend(*map(jnp.asarray, (step.q, entries, inputs.kv_cache, *inputs.rest))))
    assert_equal_caches(cache, inputs.cache_after)
    assert np.isfinite(out.astype(np.float32)).all()
    rows = out[: step.num_tokens].astype(np.float64)
    np.testing.assert_allclose(rows, expected(step, value_dim, cache_type), rtol=0, atol=atol)
