"""The grouped product on GPU, interpreted on CPU, against numpy in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxis.kernels.grouped_matmul import gpu
from jaxis.kernels.weights import QuantizedWeight, as_weight
from tests.support.quick_rows import quick_rows
from tests.support.weight_stacks import KINDS, grouped_product, weight_stack

# Of 50 rows: groups without rows, one that takes two tiles, one of 13 rows, rows past all.
GROUP_SIZES = (7, 0, 26, 13, 0)


def product(x, weight, group_sizes):
    stack = as_weight(weight).kernel_stack()
    assert gpu.supports(x, stack)
    run = jax.jit(
        lambda x, weight, sizes: gpu.grouped_matmul(x, as_weight(weight).kernel_stack(), sizes, interpret=True)
    )
    y = run(x, weight, np.asarray(group_sizes, np.int32))
    assert y.dtype == x.dtype
    return np.asarray(y, np.float64)


def random(*shape):
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "kind",
    quick_rows([kind for kind in KINDS if "minima" not in kind], ["bfloat16", "int4 in groups of 32", "fp8 in blocks"]),
)
def test_each_row_is_multiplied_by_its_groups_weight(kind):
    columns = 384 if "128" in kind or "blocks" in kind else 352
    x, (weight, expected) = random(50, columns), weight_stack(kind, 5, 160, columns)
    y = product(jnp.asarray(x), weight, GROUP_SIZES)
    exact = grouped_product(x, expected, GROUP_SIZES)
    np.testing.assert_allclose(y, exact, rtol=0, atol=1e-5 * np.abs(exact).max())


def test_weights_of_groups_without_rows_are_not_read():
    weight = random(3, 24, 128)
    weight[[0, 2]] = np.nan
    assert np.isfinite(product(jnp.asarray(random(5, 128)), jnp.asarray(weight), (0, 4, 0))).all()


@pytest.mark.slow
@pytest.mark.parametrize("kind", quick_rows(["bfloat16", "int4 in groups of 32", "fp8 in blocks"], ["bfloat16"]))
def test_a_rows_bits_are_the_same_regardless_of_the_batch(kind):
    x, (weight, _) = jnp.asarray(random(70, 256), jnp.bfloat16), weight_stack(kind, 2, 64, 256)
    together = product(x, weight, (3, 67))
    np.testing.assert_array_equal(product(x[3:9], weight, (0, 6)), together[3:9])


@pytest.mark.sampled
@pytest.mark.parametrize("kind", ["int8 in groups of 128", "fp8 by rows"])
def test_features_of_one_group_are_divided_between_programs_or_not_with_the_same_bits(kind):
    x, (weight, expected) = jnp.asarray(random(70, 2048), jnp.bfloat16), weight_stack(kind, 1, 64, 2048)
    few, many = product(x[:3], weight, (3,)), product(x, weight, (70,))
    np.testing.assert_array_equal(few, many[:3])
    exact = grouped_product(np.asarray(x, np.float32), expected, (70,))
    np.testing.assert_allclose(many, exact, rtol=0, atol=2e-2 * np.abs(exact).max())


def test_what_the_kernel_does_not_take():
    groups_of_48 = QuantizedWeight(jnp.zeros((2, 16, 96), jnp.int8), jnp.ones((2, 16, 2)))
    assert not gpu.supports(jnp.zeros((4, 96)), as_weight(groups_of_48).kernel_stack())
