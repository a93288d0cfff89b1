"""Products of heads with their matrices, on every instruction set and on plain JAX, against numpy."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxis.kernels.weights import head_matmul
from jaxis.kernels.weights.stack_packer import pack_stack
from tests.support.isa import each_isa, isa  # noqa: F401 (isa is a fixture)

dtypes = pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16], ids=["float32", "bfloat16"])
SHAPES = [(1, 16, 24, 64), (5, 3, 33, 16), (70, 4, 64, 24), (2, 128, 16, 8)]


def random(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def expected(x, weight):
    return np.einsum("thi,hoi->tho", x.astype(np.float64), weight.astype(np.float64))


@each_isa
@dtypes
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_packed_equals_numpy(isa, dtype, shape):  # noqa: F811
    tokens, heads, out_size, in_size = shape
    x, weight = random(tokens, heads, in_size), random(heads, out_size, in_size, seed=1).astype(dtype)
    y = head_matmul(jnp.asarray(x), pack_stack(weight))
    np.testing.assert_allclose(y, expected(x, weight), rtol=0, atol=1e-4)


@dtypes
def test_plain_equals_numpy_and_has_derivatives(dtype):
    x, weight = random(5, 3, 16), random(3, 33, 16, seed=1).astype(dtype)
    np.testing.assert_allclose(head_matmul(x, jnp.asarray(weight)), expected(x, weight), rtol=0, atol=1e-4)
    gradient = jax.grad(lambda x: head_matmul(x, jnp.asarray(weight)).sum())(jnp.asarray(x))
    np.testing.assert_allclose(gradient[2], weight.astype(np.float64).sum(1), rtol=0, atol=1e-4)


@each_isa
def test_a_token_gets_the_same_bits_in_any_batch(isa):  # noqa: F811
    x, weight = jnp.asarray(random(40, 4, 48)), pack_stack(random(4, 40, 48, seed=1).astype(ml_dtypes.bfloat16))
    together = head_matmul(x, weight)
    for size in (1, 3, 13):
        alone = [head_matmul(x[i : i + size], weight) for i in range(0, 40, size)]
        np.testing.assert_array_equal(jnp.concatenate(alone), together)
