"""Products with one low-precision weight by the kernels of grouped products, interpreted on CPU."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxis.kernels.grouped_matmul import gpu
from jaxis.kernels.weights import dequantize, matmul, products
from tests.support.quick_rows import quick_rows
from tests.support.weight_stacks import weight_stack


@pytest.fixture
def calls(monkeypatch):
    """Products run as on a GPU; the shapes of rows that the kernel got."""
    shapes = []

    def product(x, *operands, **options):
        shapes.append(x.shape)
        return gpu.grouped_matmul(x, *operands, **options, interpret=True)

    kernels = types.SimpleNamespace(
        supports=gpu.supports, xla_dequantizes_in_memory=gpu.xla_dequantizes_in_memory, grouped_matmul=product
    )
    monkeypatch.setattr(products, "accelerator_kernels", lambda: kernels)
    return shapes


def random(*shape):
    return jnp.asarray(np.random.default_rng(0).standard_normal(shape), jnp.float32)


def one_weight(kind):
    return jax.tree.map(lambda array: array[0], weight_stack(kind, 1, 96, 256)[0])


@pytest.mark.sampled
@pytest.mark.parametrize(
    "kind",
    quick_rows(
        ["int8 in groups of 32", "int4 in groups of 128", "fp8 in blocks", "MXFP4"],
        ["int8 in groups of 32", "fp8 in blocks"],
    ),
)
def test_kernels_multiply_what_xla_would_dequantize_in_memory(kind, calls):
    x, weight = random(2, 3, 256), one_weight(kind)
    y = matmul(x.astype(jnp.bfloat16), weight, preferred_element_type=jnp.float32)
    assert calls == [(6, 256)]
    assert y.dtype == jnp.float32
    exact = np.asarray(x, np.float64) @ np.asarray(dequantize(weight), np.float64).T
    np.testing.assert_allclose(y, exact, rtol=0, atol=2e-2 * np.abs(exact).max())


def test_xla_multiplies_what_it_need_not_dequantize_in_memory(calls):
    matmul(random(3, 256), one_weight("int8"))
    assert calls == []


@pytest.mark.slow
def test_derivatives_are_those_of_the_definition(calls):
    x, weight = random(3, 256), one_weight("int4 in groups of 32")
    gradient = jax.grad(lambda x: (matmul(x, weight) * random(3, 96)).sum())(x)
    expected = np.asarray(random(3, 96)) @ np.asarray(dequantize(weight))
    assert calls == [(3, 256)]
    np.testing.assert_allclose(gradient, expected, rtol=0, atol=1e-5 * np.abs(expected).max())
