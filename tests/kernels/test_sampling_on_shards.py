"""Tokens chosen from a vocabulary that is divided between devices are those of one device, bit by bit."""

import pytest

from tests.support.simulated_devices import run_on_devices

SCRIPT = """
import jax, jax.numpy as jnp, numpy as np
from jaxis.engine.execution.sampler import sample
from jaxis.engine.execution.sampling_batch import SamplerFeatures, SamplingArrays
from jaxis.kernels.sampling import argmax, tiles
from jaxis.parallel.mesh import logical_sharding, make_mesh

mesh = make_mesh(4)
rng = np.random.default_rng(0)
for vocab_size in (1200, 1024, 300, 1202):  # the last cannot be divided, and is padded
    logits = rng.standard_normal((9, vocab_size)).astype(np.float32).round(1)  # with many ties
    logits[0] = 1.0
    logits[1] = -np.inf
    logits[2, [7, 250, 299]] = np.inf
    logits[3, [40, 299]] = 9.0
    logits[4, [80, 40]] = 9.0
    expected = tiles.argmax(jnp.asarray(logits))
    np.testing.assert_array_equal(expected[0][:5], [0, 0, 7, 40, 40])
    arrays = jax.tree.map(jnp.asarray, SamplingArrays.greedy(9, vocab_size))
    tokens = sample(jnp.asarray(logits), arrays, features=SamplerFeatures()).token_ids
    np.testing.assert_array_equal(tokens[:5], [0, -1, -1, 40, 40])
    with jax.set_mesh(mesh):
        for axes in ((None, "vocab"), (None, None)):  # as a head computes them, and gathered
            placed = jax.device_put(logits, logical_sharding(mesh, axes, logits.shape))
            ids, peaks = jax.jit(argmax)(placed)
            np.testing.assert_array_equal(ids, expected[0])
            np.testing.assert_array_equal(peaks, expected[1])
            assert ids.dtype == jnp.int32
            again = sample(placed, arrays, features=SamplerFeatures()).token_ids
            np.testing.assert_array_equal(again, tokens)
"""


@pytest.mark.multi_device
def test_the_first_most_likely_token_is_found_on_any_number_of_devices():
    run_on_devices("-c", SCRIPT, xla_flags="--xla_backend_optimization_level=0")
