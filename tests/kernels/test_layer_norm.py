"""Layer norm against float64 numpy, on every instruction set."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxis.kernels.norms import layer_norm, layer_norm_definition
from tests.support.kernel_paths import PLAIN, each_path, path  # noqa: F401

pytestmark = [each_path, pytest.mark.usefixtures("path")]
EPSILON = 1e-5
# x, and the weights: more than one task; no multiple of a vector; weights for each row of a token.
SHAPES = [((300, 128), (128,)), ((7, 33), (33,)), ((5, 6, 48), (6, 48)), ((0, 16), (16,))]
shapes = pytest.mark.parametrize("shape", SHAPES, ids=str)


def operands(shape):
    rng = np.random.default_rng(0)
    # A mean far from 0, which must not cost digits.
    x = (rng.normal(size=shape[0]) + 50).astype(np.float32)
    return x, *(rng.normal(size=shape[1]).astype(np.float32) for _ in range(2))


@pytest.mark.sampled(3)
@shapes
@pytest.mark.parametrize("has_bias", [True, False])
def test_equals_the_formula(shape, has_bias):
    x, weight, bias = operands(shape)
    ours = layer_norm(jnp.asarray(x), jnp.asarray(weight), jnp.asarray(bias) if has_bias else None, epsilon=EPSILON)
    wide = x.astype(np.float64)
    centred = wide - wide.mean(-1, keepdims=True)
    expected = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + EPSILON) * weight + (bias if has_bias else 0)
    np.testing.assert_allclose(ours, expected, rtol=0, atol=5e-5)


def test_a_row_does_not_depend_on_the_others(path):  # noqa: F811
    if path == PLAIN:
        pytest.skip("XLA does not promise it")
    x, weight, bias = map(jnp.asarray, operands(((300, 1027), (1027,))))
    together = layer_norm(x, weight, bias, epsilon=EPSILON)
    for row in (0, 17, 299):
        np.testing.assert_array_equal(layer_norm(x[row : row + 1], weight, bias, epsilon=EPSILON)[0], together[row])


@pytest.mark.slow
def test_derivatives_are_the_definitions():
    x, weight, bias = operands(((5, 2, 24), (2, 24)))

    def gradient(function):
        return jax.grad(lambda *args: jnp.sum(jnp.sin(function(*args, epsilon=EPSILON))), argnums=(0, 1, 2))

    ours, expected = gradient(layer_norm)(x, weight, bias), gradient(layer_norm_definition)(x, weight, bias)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), ours, expected)
