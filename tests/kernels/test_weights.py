"""Every type of weight has every operation, and they are those of the array that it stands for."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxis.kernels import native
from jaxis.kernels.weights import (
    BlockScaledWeight,
    ReorderedWeight,
    WeightScheme,
    as_value,
    as_weight,
    dequantize,
    fused_matmul,
    lookup,
    matmul,
    pack,
    quantize,
    take_rows,
)
from tests.kernels.coded_weights import KINDS, random_codes
from tests.support.quantized_products import LOW_PRECISION_FLOATS, random_blocks
from tests.support.quick_rows import quick_rows

ROWS, COLUMNS = 70, 256


def random(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@functools.cache
def weights():
    """Name -> a weight of host arrays."""
    array = random(ROWS, COLUMNS)
    made = {"array": array, "int8": quantize(array, WeightScheme("int8"))}
    made["int4"] = quantize(array, WeightScheme("int4", 32, "minmax"))
    made |= {name: random_blocks(name, ROWS, COLUMNS)[0] for name in LOW_PRECISION_FLOATS}
    return made | {name: random_codes(name, ROWS, COLUMNS)[0] for name in KINDS}


@functools.cache
def packed():
    return {name: pack(weight) for name, weight in weights().items()} if native.usable() else {}


def cases():
    return [*weights().items(), *((f"{name} packed", weight) for name, weight in packed().items())]


# Codes with and without upper bits, levels, minima, zero points and scales of scales; others combine these.
QUICK_CODES = {"q5_1", "q3_k", "iq4_xs", "nvfp4", "hqq"}


def rows(named_weights):
    """Rows of a name and its weight, of which those of other codes are slow."""
    slow = KINDS.keys() - QUICK_CODES
    return [
        pytest.param(name, weight, marks=[pytest.mark.slow] * (name.removesuffix(" packed") in slow), id=name)
        for name, weight in named_weights
    ]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("name", "weight"), rows(cases()))
def test_shapes_and_bytes_are_those_of_the_arrays(name, weight):
    assert as_value(as_weight(weight)) is weight
    assert as_weight(weight).shape == (ROWS, COLUMNS)
    assert as_weight(weight).nbytes == sum(array.nbytes for array in jax.tree.leaves(weight))
    assert as_weight(weight).is_packed == name.endswith(" packed")
    # A stack of experts is the same form with a leading axis.
    stack = as_weight(jax.tree.map(lambda array: jnp.stack([array] * 3), weight))
    assert type(stack) is type(as_weight(weight))
    assert stack.shape == (3, ROWS, COLUMNS)


def test_what_elements_are_stored_as_is_named():
    names = {"array": "float32", "int8": "int8", "float8_e4m3fn": "float8_e4m3fn", "iq4_nl": "4-bit", "q6_k": "int6"}
    for name, storage in names.items():
        assert as_weight(weights()[name]).storage == storage
        if native.usable():
            assert as_weight(packed()[name]).storage == storage


@pytest.mark.sampled(6)
@pytest.mark.parametrize(("name", "weight"), rows(cases()))
def test_operations_are_those_of_the_array_it_stands_for(name, weight):
    dense = np.asarray(dequantize(weight))
    reference = np.asarray(dequantize(weights()[name.removesuffix(" packed")]))
    np.testing.assert_array_equal(dense, reference)
    x = random(5, COLUMNS, seed=1)
    y = jax.jit(matmul)(x, weight)
    # Off by the rounding of sums only, whatever the weight's size.
    exact, magnitude = x.astype(np.float64) @ dense.T, np.abs(x.astype(np.float64)) @ np.abs(dense).T
    np.testing.assert_array_less(np.abs(y - exact), 5e-7 * magnitude)
    assert matmul(jnp.asarray(x, jnp.bfloat16), weight, preferred_element_type=jnp.float32).dtype == jnp.float32
    ids = np.array([0, ROWS - 1, 65, 3, ROWS + 5], np.int32)
    np.testing.assert_array_equal(lookup(ids, weight, jnp.float32), dense[np.clip(ids, 0, ROWS - 1)])
    together = fused_matmul(x, [weight, weight])
    assert together is None or all(np.array_equal(each, y) for each in together)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", KINDS)
def test_coded_weights_stand_for_what_their_definition_says(name):
    weight, expected = random_codes(name, ROWS, COLUMNS)
    assert weight.shape == expected.shape
    np.testing.assert_allclose(dequantize(weight), expected, rtol=2e-7, atol=1e-7 * np.abs(expected).max())


def test_what_is_no_weight_is_refused():
    with pytest.raises(TypeError, match="str is not a type of weight"):
        matmul(random(1, 2), "int8")


def _one_scale() -> BlockScaledWeight:
    value = random_blocks("float8_e4m3fn", ROWS, COLUMNS)[0].value
    return BlockScaledWeight(value, np.full((1, 1), 0.5, np.float32), (ROWS, COLUMNS))


def _reordered() -> ReorderedWeight:
    order = np.random.default_rng(2).permutation(COLUMNS).astype(np.int32)[None]
    return ReorderedWeight(quantize(random(ROWS, COLUMNS), WeightScheme("int4", 32, "minmax")), order)


# Heads of 10 rows, each twice; the two halves of heads of 14 rows apart; rows without a pattern.
ROW_ORDERS = {
    "repeated": np.repeat(np.arange(ROWS).reshape(7, 10), 2, axis=0).ravel(),
    "interleaved": np.arange(ROWS).reshape(5, 2, 7).swapaxes(0, 1).ravel(),
    "any": np.array([69, 0, 1, 1, 33]),
}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("order", quick_rows(ROW_ORDERS, ["any"]))
@pytest.mark.parametrize(
    ("name", "weight"), rows([*weights().items(), ("one scale", _one_scale()), ("reordered", _reordered())])
)
def test_taken_rows_are_those_of_the_array_it_stands_for(name, weight, order):
    rows = ROW_ORDERS[order]
    taken = take_rows(weight, rows)
    assert type(taken) is type(weight) or name == "array"
    assert taken.shape == (len(rows), COLUMNS)
    np.testing.assert_array_equal(dequantize(taken), np.asarray(dequantize(weight))[rows])


@pytest.mark.skipif(not native.usable(), reason="only native kernels pack weights")
def test_rows_of_a_packed_weight_cannot_be_taken():
    with pytest.raises(TypeError, match="packed weight"):
        take_rows(packed()["int8"], np.arange(3))
