"""The grouped product in plain JAX: its definition and its loop, against numpy in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxis.kernels.grouped_matmul import loop, reference
from jaxis.kernels.weights import ROWS_AXIS, ExpertStacks, QuantizedWeight, WeightScheme, experts, quantize
from jaxis.kernels.weights.grouped_experts import grouped_matmul
from jaxis.layers.glu import GLU
from tests.support.quantized_products import expected_weight, quantized_product

# Of 40 rows: some groups without any, one group with all, rows past the last group, one row each.
GROUP_SIZES = [(7, 0, 20, 13, 0), (0, 0, 0, 40, 0), (3, 0, 0, 5, 1), (0, 0, 0, 0, 0), (1, 1, 1, 1, 36)]
sizes = pytest.mark.parametrize("group_sizes", GROUP_SIZES, ids=lambda sizes: "-".join(map(str, sizes)))


def random(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def expected(x, group_sizes, multiply):
    """multiply(rows, group) of each group's rows, 0 for the others."""
    parts = [multiply(rows, group) for group, rows in enumerate(np.split(x, np.cumsum(group_sizes))[:-1])]
    product = np.concatenate(parts)
    return np.pad(product, ((0, len(x) - len(product)), (0, 0)))


def dense(x, weight, group_sizes):
    return expected(x.astype(np.float64), group_sizes, lambda rows, group: rows @ weight[group].astype(np.float64).T)


@sizes
@pytest.mark.parametrize("function", [grouped_matmul, reference.grouped_matmul], ids=["loop", "definition"])
def test_each_row_is_multiplied_by_its_groups_weight(function, group_sizes):
    x, weight = random(40, 19), random(5, 33, 19, seed=1)
    y = jax.jit(function)(x, weight, np.array(group_sizes, np.int32))
    np.testing.assert_allclose(y, dense(x, weight, group_sizes), rtol=0, atol=1e-5)


def test_bfloat16_stays_bfloat16():
    x, weight = jnp.asarray(random(40, 64), jnp.bfloat16), jnp.asarray(random(5, 32, 64, seed=1), jnp.bfloat16)
    y = grouped_matmul(x, weight, jnp.array(GROUP_SIZES[0], jnp.int32))
    assert y.dtype == jnp.bfloat16
    exact = dense(np.asarray(x, np.float32), np.asarray(weight, np.float32), GROUP_SIZES[0])
    np.testing.assert_allclose(y.astype(jnp.float32), exact, rtol=1e-2, atol=1e-2 * np.abs(exact).max())


def test_derivatives_are_those_of_the_definition():
    x, weight, group_sizes = random(40, 12), random(5, 9, 12, seed=1), np.array(GROUP_SIZES[0], np.int32)
    cotangent = random(40, 9, seed=2)

    def gradients(function):
        return jax.jit(jax.grad(lambda x, w: (function(x, w, group_sizes) * cotangent).sum(), (0, 1)))(x, weight)

    groups = np.split(np.arange(40), np.cumsum(group_sizes))[:-1]
    by_hand = [
        np.concatenate([cotangent[rows] @ weight[group] for group, rows in enumerate(groups)]),
        np.stack([cotangent[rows].T @ x[rows] for rows in groups]),
    ]
    for actual, wanted in zip(gradients(grouped_matmul), by_hand, strict=True):
        np.testing.assert_allclose(actual, wanted, rtol=0, atol=1e-4)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("how", [("int8", None, "absmax"), ("int8", 32, "absmax"), ("int4", 32, "minmax")], ids=str)
@pytest.mark.parametrize("act_qtype", [None, "int8"])
def test_quantized_weights(how, act_qtype):
    x, group_sizes = random(40, 64), GROUP_SIZES[0]
    weights = [quantize(random(24, 64, seed=group), WeightScheme(*how, act_qtype=act_qtype)) for group in range(5)]

    def multiply(rows, group):
        if act_qtype is None:
            return rows.astype(np.float64) @ expected_weight(weights[group]).T
        return quantized_product(rows, weights[group])

    stack = jax.tree.map(lambda *arrays: jnp.asarray(np.stack(arrays)), *weights)
    assert isinstance(stack, QuantizedWeight)
    assert stack.shape == (5, 24, 64)
    exact = expected(x, group_sizes, multiply)
    y, derive = jax.vjp(lambda x: jax.jit(grouped_matmul)(x, stack, jnp.array(group_sizes, jnp.int32)), jnp.asarray(x))
    np.testing.assert_allclose(y, exact, rtol=0, atol=1e-5 * np.abs(exact).max())
    cotangent = random(40, 24, seed=9)
    by_hand = expected(cotangent, group_sizes, lambda rows, group: rows @ expected_weight(weights[group]))
    np.testing.assert_allclose(derive(cotangent)[0], by_hand, rtol=0, atol=1e-5 * np.abs(by_hand).max())


@pytest.mark.parametrize("scales_input", [False, True])
def test_rows_that_are_mapped_over_are_multiplied_together(scales_input, monkeypatch):
    weights = [jnp.asarray(random(5, *shape, seed=i)) for i, shape in enumerate([(24, 16), (24, 16), (16, 24)])]
    biases = [jnp.asarray(random(*weight.shape[:2], seed=i + 3)) for i, weight in enumerate(weights)]
    rng = np.random.default_rng(0)
    x, routed = random(3, 8, 16, seed=6), jnp.asarray(rng.random((3, 8, 2), np.float32))
    ids = jnp.asarray(rng.permuted(np.tile(np.arange(5), (3, 8, 1)), axis=-1)[..., :2])
    form = ExpertStacks(*weights, *biases, 5, GLU(jax.nn.silu), scales_input)

    def total(over_rows, weights, x, routed):
        row = lambda x, ids, routed: experts(x, ids, routed, form.with_arrays(weights, biases))  # noqa: E731
        return jnp.sum(over_rows(row)(x, ids, routed) ** 2)

    def gradients(over_rows):
        return jax.jit(jax.grad(functools.partial(total, over_rows), (0, 1, 2)))

    alone = gradients(lambda row: lambda *rows: jnp.stack([row(*each) for each in zip(*rows, strict=True)]))
    wanted, multiply, multiplied = alone(weights, x, routed), loop.grouped_matmul, []
    monkeypatch.setattr(
        loop,
        "grouped_matmul",
        lambda each, rows, *others: multiplied.append(len(rows)) or multiply(each, rows, *others),
    )
    found = gradients(lambda row: jax.vmap(row, axis_name=ROWS_AXIS))(weights, x, routed)
    assert max(multiplied) == x.shape[0] * ids.shape[1] * ids.shape[2]
    for mine, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=1e-5 * np.abs(theirs).max())


def test_weights_of_groups_without_rows_are_not_read():
    weight = random(5, 8, 16)
    weight[[1, 4]] = np.nan  # which would reach every result
    y = grouped_matmul(jnp.asarray(random(40, 16)), jnp.asarray(weight), jnp.array(GROUP_SIZES[0], jnp.int32))
    assert np.isfinite(y).all()
