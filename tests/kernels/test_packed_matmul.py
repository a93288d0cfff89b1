"""Packed weights and the native products with them, on every instruction set, against numpy in float64."""

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxis.kernels import native
from jaxis.kernels.weights import (
    BlockScaledWeight,
    QuantizedWeight,
    WeightScheme,
    dequantize,
    lookup,
    quantize,
)
from jaxis.kernels.weights import packed_weight as packed
from tests.support.isa import each_isa, isa  # noqa: F401 (isa is a fixture)
from tests.support.quantized_products import LOW_PRECISION_FLOATS, expected_weight, quantized_product, random_blocks

pytestmark = [
    pytest.mark.skipif(native.library() is None, reason="the native library is not built"),
    each_isa,
    pytest.mark.usefixtures("isa"),
]

# type, columns that share a scale (None: all), calibration (minmax has zero points), wide scales
INT8 = [*(("int8", group, "absmax", False) for group in (None, 32, 64, 128)), ("int8", 64, "absmax", True)]
INT4 = [("int4", group, how, False) for group in (None, 32, 64, 128) for how in ("absmax", "minmax")]
WIDE = [("int8", None, "absmax", True), ("int4", None, "absmax", True), ("int4", 128, "minmax", True)]
SCHEMES = ["float32", "bfloat16", *LOW_PRECISION_FLOATS, *INT8, *INT4, *WIDE]
# Groups of other lengths differ from those of 32 by a number that a loop counts to.
SLOW = [scheme for scheme in SCHEMES if not isinstance(scheme, str) and scheme[1] in (64, 128) and not scheme[3]]
schemes = pytest.mark.parametrize(
    "scheme",
    [pytest.param(scheme, marks=[pytest.mark.slow] * (scheme in SLOW)) for scheme in SCHEMES],
    ids=[scheme if isinstance(scheme, str) else "-".join(map(str, scheme)) for scheme in SCHEMES],
)
ROWS = 40
# Of a batch: one row, and as many as the micro-kernels take and do not.
PARTS = [
    slice(0, ROWS),
    *(slice(at, at + n) for at, n in [(0, 1), (3, 1), (39, 1), (5, 2), (11, 6), (20, 13), (2, 37)]),
]


def random(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@dataclasses.dataclass
class Weight:
    """A packed weight, and what it stands for."""

    packed: packed.PackedWeight
    dense: np.ndarray  # float64 [out, in]
    quantized: QuantizedWeight | None

    def product(self, x, act_qtype):
        if act_qtype is None:
            return x.astype(np.float64) @ self.dense.T
        return quantized_product(x, self.quantized)


def make(scheme, n, k, seed=0):
    numbers = random(n, k, seed=seed)
    if scheme in LOW_PRECISION_FLOATS:
        weight, dense = random_blocks(scheme, n, k, seed)
        return Weight(weight.pack(), dense, None)
    if isinstance(scheme, str):
        numbers = numbers.astype(ml_dtypes.bfloat16 if scheme == "bfloat16" else np.float32)
        return Weight(packed.pack(numbers), numbers.astype(np.float64), None)
    *how, wide = scheme
    weight = quantize(numbers, WeightScheme(*how))
    # A scale that bfloat16 does not have, where there is one a row as where it is a group's.
    scale = weight.scale.astype(np.float32) * np.float32(1.001) if wide else weight.scale.astype(ml_dtypes.bfloat16)
    weight = dataclasses.replace(weight, scale=scale)
    return Weight(weight.pack(), expected_weight(weight), weight)


def sizes(scheme):
    if scheme == "float4_e2m1fn":
        return [(1, 384), (33, 128), (100, 256), (32, 32)]
    by_row = isinstance(scheme, str) or scheme[:2] == ("int8", None)
    return [(1, 384), (33, 128), (100, 256), *([(33, 101), (32, 1)] if by_row else [])]


def act_qtypes(scheme):
    return [None] if isinstance(scheme, str) else [None, "int8"]


@pytest.mark.sampled(6)
@schemes
def test_products_equal_numpy_and_a_row_is_the_same_in_any_batch(scheme):
    for n, k in sizes(scheme):
        weight, x = make(scheme, n, k), random(ROWS, k, seed=1)
        x[3, : k // 2] = 0
        for act_qtype in act_qtypes(scheme):
            # One program for all of them: compiling takes longer than running.
            multiply = jax.jit(lambda x, w, q=act_qtype: [packed.matmul(x[p], [w], act_qtype=q)[0] for p in PARTS])
            together, *parts = multiply(x, weight.packed)
            tolerance = 2e-6 * np.abs(x).sum(axis=1).max() * np.abs(weight.dense).max()
            message = f"{n}, {k}, {act_qtype}"
            np.testing.assert_allclose(together, weight.product(x, act_qtype), rtol=0, atol=tolerance, err_msg=message)
            for part, rows in zip(PARTS[1:], parts, strict=True):
                np.testing.assert_array_equal(rows, together[part], err_msg=f"{message}, {part}")


def test_numbers_of_bfloat16_have_the_products_of_float32():
    weights = [make("bfloat16", 100, 101, seed=seed).packed for seed in range(2)]
    x = jnp.asarray(random(ROWS, 101, seed=2), jnp.bfloat16)
    for activation in (None, "silu"):
        expected = packed.matmul(x.astype(jnp.float32), weights, activation=activation)
        for rows in (1, ROWS):
            products = packed.matmul(x[:rows], weights, activation=activation)
            np.testing.assert_array_equal(products, [y[:rows] for y in expected])


@pytest.mark.sampled(3)
@schemes
def test_several_matrices_in_one_call_are_each_alone(scheme):
    weights = [make(scheme, n, 128, seed=n).packed for n in (64, 1, 33, 100)]
    assert len({weight.format for weight in weights}) == 1
    x = jnp.asarray(random(9, 128, seed=1))

    def multiply(x, weights, act_qtype):
        groups = [weights, *([weight] for weight in weights)]
        return [packed.matmul(x[:rows], group, act_qtype=act_qtype) for rows in (1, 9) for group in groups]

    for act_qtype in act_qtypes(scheme):
        results = jax.jit(multiply, static_argnums=2)(x, weights, act_qtype)
        for together, *alone in (results[:5], results[5:]):
            for y, [expected] in zip(together, alone, strict=True):
                np.testing.assert_array_equal(y, expected)


@pytest.mark.sampled(3)
@schemes
@pytest.mark.parametrize("activation", ["silu", pytest.param("gelu_tanh", marks=pytest.mark.slow)])
def test_gated_products(scheme, activation):
    gate, up = make(scheme, 33, 128), make(scheme, 33, 128, seed=1)
    function = {"silu": jax.nn.silu, "gelu_tanh": jax.nn.gelu}[activation]
    x = random(9, 128, seed=2) / 8  # so that the activation is not in its flat parts
    for act_qtype in act_qtypes(scheme):
        weights = [gate.packed, up.packed]
        (y,) = packed.matmul(jnp.asarray(x), weights, act_qtype=act_qtype, activation=activation)
        with jax.enable_x64(True):
            expected = function(jnp.asarray(gate.product(x, act_qtype))) * up.product(x, act_qtype)
        np.testing.assert_allclose(y, expected, rtol=0, atol=1e-5 * np.abs(expected).max())
        (alone,) = packed.matmul(jnp.asarray(x[4:5]), weights, act_qtype=act_qtype, activation=activation)
        np.testing.assert_array_equal(alone, y[4:5])


@pytest.mark.sampled(3)
@schemes
def test_rows_looked_up_are_those_packed(scheme):
    for n, k in sizes(scheme):
        weight = make(scheme, n, k)
        ids = np.array([0, n - 1, n // 2, n // 3, 0, -5, n + 1000], np.int32)
        rows = lookup(jnp.asarray(ids), weight.packed, jnp.float32)
        np.testing.assert_allclose(rows, weight.dense[np.clip(ids, 0, n - 1)], rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [np.float16, np.float64])
def test_other_float_types_are_packed_as_float32(dtype):
    numbers = random(5, 7).astype(dtype)
    weight = packed.pack(numbers)
    assert weight.storage == "float32"
    np.testing.assert_array_equal(lookup(jnp.arange(5), weight, jnp.float32), numbers.astype(np.float32))


def test_a_weight_takes_the_memory_of_its_type():
    sizes = [
        ("float32", 4),
        ("bfloat16", 2),
        ("float8_e4m3fn", 1),
        ("float4_e2m1fn", 17 / 32),
        (INT8[0], 1),
        (INT4[4], 0.5),
    ]
    for scheme, bytes_per_number in sizes:
        number_of_weights = 64 * 512
        size = make(scheme, 64, 512).packed.nbytes
        assert bytes_per_number <= size / number_of_weights < 1.15 * bytes_per_number


@pytest.mark.sampled(3)
@pytest.mark.parametrize("qtype", LOW_PRECISION_FLOATS)
def test_blocks_dequantized_and_multiplied_by_plain_jax_equal_numpy(qtype):
    weight, dense = random_blocks(qtype, 200, 256)
    np.testing.assert_allclose(dequantize(weight), dense, rtol=1e-6, atol=0)
    x = random(3, 256)
    tolerance = 2e-6 * np.abs(x).sum(axis=1).max() * np.abs(dense).max()
    np.testing.assert_allclose(weight.matmul(jnp.asarray(x)), x @ dense.T, rtol=0, atol=tolerance)


def test_every_number_of_eight_bits():
    """Each stands in a row of its own."""
    codes = np.array([code for code in range(256) if code & 127 != 127], np.uint8)
    value = codes.repeat(2).reshape(-1, 2).view(ml_dtypes.float8_e4m3fn)
    weight = BlockScaledWeight(value, np.full((2, 1), 0.5, np.float32), (128, 128)).pack()
    expected = value[:, 0].astype(np.float32) / 2
    (y,) = packed.matmul(jnp.asarray([[0.0, 1.0], [1.0, 0.0]]), [weight])
    np.testing.assert_array_equal(y, [expected, expected])
    np.testing.assert_array_equal(lookup(jnp.arange(len(codes)), weight, jnp.float32)[:, 1], expected)


@pytest.mark.parametrize(
    ("qtype", "tile_size", "columns"), [("int8", 16, 64), ("int4", 16, 64), ("int4", None, 80), ("int8", 96, 192)]
)
def test_groups_that_the_kernels_do_not_have_are_reported(qtype, tile_size, columns):
    assert quantize(random(4, columns), WeightScheme(qtype, tile_size)).pack() is None
