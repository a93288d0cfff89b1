"""Kernels that compute in float32, given bfloat16 or float16: rounded where their definitions round, and no row's bits
depend on the others."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest

from jaxis.kernels import gates, native, norms, rotary_embedding
from jaxis.kernels.rotary_embedding import HeadNorms

pytestmark = pytest.mark.skipif(not native.usable(), reason="needs the native kernels")

EPSILON = 1e-6


def with_head_norms(function):
    return lambda q, k, cos, sin, *weights: jnp.concatenate(
        function(q, k, cos, sin, interleaved=False, norms=HeadNorms(*weights, EPSILON)), axis=1
    )


def with_epsilon(function):
    return functools.partial(function, epsilon=EPSILON)


def gated_by_sigmoid(function):
    return functools.partial(function, activation="sigmoid")


# What makes them functions of their operands alone; the kernel; its definition; the operands' shapes; how many of the
# operands, the first ones, have a row for each token.
CASES = {
    "rms norm": (with_epsilon, norms.rms_norm, norms.rms_norm_definition, [(70, 1027), (1027,)], 1),
    "layer norm": (
        with_epsilon,
        norms.layer_norm,
        norms.layer_norm_definition,
        [(70, 1027), (1027,), (1027,)],
        1,
    ),
    "gate": (gated_by_sigmoid, gates.gated, gates.gated_definition, [(70, 96), (70, 6)], 2),
    "head norms and rope": (
        with_head_norms,
        rotary_embedding.rotary_embedding,
        rotary_embedding.rotary_embedding_definition,
        [(70, 4, 80), (70, 2, 80), (70, 40), (70, 40), (80,), (80,)],
        4,
    ),
}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("case", CASES)
def test_rounds_as_the_definition_does(case, dtype):
    form, kernel, definition, shapes, num_by_token = CASES[case]
    rng = np.random.default_rng(0)
    operands = [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes]
    if case == "head norms and rope":  # cosines and sines are never in bfloat16
        operands[2:4] = [x.astype(jnp.float32) for x in operands[2:4]]
    ours, expected = form(kernel)(*operands), form(definition)(*operands)
    assert ours.dtype == expected.dtype == dtype
    ours, expected = np.asarray(ours, np.float32), np.asarray(expected, np.float32)
    one_unit = float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(ours, expected, rtol=2 * one_unit, atol=2 * one_unit)
    # Sums in another order move few elements over a bound between two roundings.
    assert np.mean(ours == expected) > 0.99
    by_token, others = operands[:num_by_token], operands[num_by_token:]
    for start, stop in ((0, 1), (69, 70), (17, 41)):
        alone = form(kernel)(*(x[start:stop] for x in by_token), *others)
        np.testing.assert_array_equal(np.asarray(alone, np.float32), ours[start:stop])


def test_a_bfloat16_input_with_a_float32_weight_is_rounded_once():
    rng = np.random.default_rng(0)
    x, weight = jnp.asarray(rng.normal(size=(70, 96)), jnp.bfloat16), jnp.asarray(rng.normal(size=96), jnp.float32)
    ours = norms.rms_norm(x, weight, epsilon=EPSILON)
    wide = norms.rms_norm(x.astype(jnp.float32), weight, epsilon=EPSILON)
    assert ours.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(ours, np.float32), np.asarray(wide.astype(jnp.bfloat16), np.float32))
