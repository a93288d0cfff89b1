"""Moments of rows against NumPy, on every instruction set and in plain JAX."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxis.kernels.norms import row_moments
from tests.support.kernel_paths import PLAIN, each_path, path  # noqa: F401

pytestmark = [each_path, pytest.mark.usefixtures("path")]


@pytest.mark.parametrize("shape", [(7, 1), (3, 2, 100)])
def test_moments_are_those_of_each_row(shape):
    x = np.random.default_rng(0).normal(3.0, 2.0, shape).astype(np.float32)
    mean, variance = jax.jit(row_moments)(x)
    wide = x.astype(np.float64)
    np.testing.assert_allclose(mean, wide.mean(-1, keepdims=True), rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(variance, wide.var(-1, keepdims=True), rtol=1e-5, atol=1e-6)


def test_bits_do_not_depend_on_other_rows(path):  # noqa: F811
    if path == PLAIN:
        pytest.skip("XLA does not promise it")
    x = np.random.default_rng(1).normal(size=(40, 257)).astype(np.float32)
    together, alone = row_moments(x), row_moments(x[11:12])
    for moments, of_row in zip(together, alone, strict=True):
        np.testing.assert_array_equal(moments[11:12], of_row)


@pytest.mark.sampled(3)
def test_derivatives_are_the_definitions():
    x = jnp.asarray(np.random.default_rng(2).normal(size=(3, 20)), jnp.float32)
    gradient = jax.grad(lambda x: jnp.sum(jnp.sin(row_moments(x)[0]) * row_moments(x)[1]))(x)
    expected = jax.grad(lambda x: jnp.sum(jnp.sin(x.mean(-1)) * x.var(-1)))(x)
    np.testing.assert_allclose(gradient, expected, rtol=1e-4, atol=1e-6)
