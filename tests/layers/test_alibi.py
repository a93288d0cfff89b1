"""Attention with biases by distance: what the extended queries and keys add to scores."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxis.errors import ConfigError
from jaxis.layers.alibi import Alibi
from jaxis.layers.kv_cache_spec import KVCacheSpec


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_scores_differ_by_the_slopes_times_the_distance_in_any_type(dtype, head_dim):
    alibi, scale = Alibi.of_powers(12), head_dim**-0.5
    positions = jnp.asarray([0, 1, 255, 257, 4095, 100_000])
    zeros = jnp.zeros((6, 12, head_dim), dtype)
    q, k = alibi.extend(zeros, zeros, positions, scale=scale)
    assert q.dtype == k.dtype == dtype
    scores = scale * np.einsum("thd,shd->hts", np.asarray(q, np.float64), np.asarray(k, np.float64))
    # The paper's slopes of 8 heads, then every other one of 16.
    slopes = [2.0**-i for i in range(1, 9)] + [2.0 ** -(i / 2) for i in (1, 3, 5, 7)]
    expected = np.asarray(slopes)[:, None, None] * np.asarray(positions, np.float64)[None, None]
    np.testing.assert_allclose(scores, np.broadcast_to(expected, scores.shape), rtol=3e-7)


def test_a_cache_of_int8_is_refused():
    with pytest.raises(ConfigError, match="ALiBi"):
        KVCacheSpec(2, 80, holds_biases=True).layout(16, jnp.int8)
