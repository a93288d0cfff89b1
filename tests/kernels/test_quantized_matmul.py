"""Quantizing and multiplying, against numpy in float64."""

import dataclasses

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxis.kernels.weights import WeightScheme, quantize, reference
from tests.support.quantized_products import expected_weight, integers, quantized_product

SCHEMES = [
    ("int8", None, "absmax"),
    ("int8", 32, "absmax"),
    ("int4", None, "absmax"),
    ("int4", 32, "absmax"),
    ("int4", 16, "mse"),
    ("int4", 32, "minmax"),
    ("int4", None, "minmax"),
]


def by_xla(x, weight, *, act_qtype=None, preferred_element_type=None):
    return dataclasses.replace(weight, act_qtype=act_qtype).matmul(jnp.asarray(x), preferred_element_type)


def random(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_values_lie_within_half_a_step(scheme):
    w = random(37, 64)
    weight = quantize(w, WeightScheme(*scheme))
    step = np.repeat(np.abs(weight.scale.astype(np.float64)), weight.group_size, axis=1)
    error = np.abs(expected_weight(weight) - w)
    # Searching for the least squared error may clip the largest value; rounding a scale to bfloat16, too, a little.
    slack = {"mse": 1.0, "minmax": 0.6, "absmax": 0.04}[scheme[2]]
    assert (error <= step * (0.5 + slack)).all()
    assert np.quantile(error / step, 0.9) <= 0.51


def test_int8_by_channel_is_round_half_even_of_the_weight_over_its_scale():
    w = random(5, 96)
    w[2] = 0
    w[3] = np.linspace(-127, 127, 96).round() / 2  # with halves
    weight = quantize(w, WeightScheme("int8"))
    scale = np.abs(w).max(axis=1, keepdims=True) / np.float32(127)
    np.testing.assert_array_equal(weight.scale, scale)
    np.testing.assert_array_equal(weight.qvalue, np.rint(w / np.where(scale == 0, 1, scale)))


@pytest.mark.parametrize("tile_size", [16, 32, 96])
def test_int8_scales_of_groups_are_codes_times_a_power_of_two_rounded_up(tile_size):
    w = random(40, 192) * np.exp2(np.random.default_rng(1).uniform(-12, 12, (40, 1))).astype(np.float32)
    w[:, :96] *= 1e-4  # small beside the others: coarse scales, but of few codes never none
    w[3, tile_size:] = 0
    weight = quantize(w, WeightScheme("int8", tile_size))
    assert weight.scale.dtype == ml_dtypes.bfloat16
    scale = weight.scale.astype(np.float64)
    unit = np.exp2(np.floor(np.log2(scale.max(axis=1, keepdims=True))) - 7)
    codes = scale / unit
    np.testing.assert_array_equal(codes, np.round(codes))
    assert codes.max() <= 255
    largest = np.abs(w.astype(np.float64)).reshape(40, -1, tile_size).max(axis=-1)
    assert (scale * 127 >= largest * (1 - 2**-23)).all()
    assert ((codes - 1) * unit * 127 < largest * (1 + 2**-23))[largest > 0].all()
    np.testing.assert_array_equal(scale == 0, largest == 0)


def test_integers_are_chosen_for_the_rounded_scale():
    w = random(8, 64)
    weight = quantize(w, WeightScheme("int4", 32))
    groups = w.reshape(8, 2, 32)
    scale = (np.abs(groups).max(axis=-1) / np.float32(7)).astype(ml_dtypes.bfloat16)
    assert weight.scale.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(weight.scale, scale)
    q = np.clip(np.rint(groups / scale.astype(np.float32)[..., None]), -8, 7)
    np.testing.assert_array_equal(integers(weight), q.reshape(8, 64))


def test_zero_points_follow_the_range_of_each_group():
    w = random(6, 64)
    w[0] = np.abs(w[0])
    w[1] = -np.abs(w[1])
    weight = quantize(w, WeightScheme("int4", 32, "minmax"))
    assert (weight.zero_point[0] == 0).all()
    assert (weight.zero_point[1] == 15).all()
    one_sided = quantize(w[:2], WeightScheme("int4", 32))
    assert ((expected_weight(weight) - w)[:2] ** 2).mean() < 0.4 * ((expected_weight(one_sided) - w[:2]) ** 2).mean()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("int3",), "cannot be quantized to 'int3'"),
        (("int4", 32, "rms"), "cannot be quantized to int4 by 'rms'; known: absmax, minmax, mse, affine"),
        (("int6", 32, "mse"), "cannot be quantized to int6 by 'mse'"),
        (("int5", 4, "affine"), "has 12 input features; int5 needs a multiple of 8"),
        (("int8", None, "mse"), "quantized to int8 by 'mse'"),
        (("int8", 48), "has 32 input features, which tile_size=48 does not divide"),
    ],
)
def test_what_does_not_go_together_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        quantize(random(4, 12 if arguments[0] == "int5" else 32), WeightScheme(*arguments))


def test_an_odd_number_of_columns_has_no_int4():
    with pytest.raises(ValueError, match="needs an even number"):
        quantize(random(4, 33), WeightScheme("int4"))


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("function", [reference.quantized_matmul, by_xla])
class TestProduct:
    @pytest.mark.sampled(3)
    def test_with_float_activations(self, scheme, rows, function):
        x, weight = random(rows, 96, seed=1), quantize(random(11, 96), WeightScheme(*scheme))
        exact = x.astype(np.float64) @ expected_weight(weight).T
        np.testing.assert_allclose(function(x, weight), exact, rtol=0, atol=1e-5 * np.abs(exact).max())

    @pytest.mark.sampled(6)
    def test_with_int8_activations(self, scheme, rows, function):
        x, weight = random(rows, 96, seed=1), quantize(random(11, 96), WeightScheme(*scheme))
        x[0, :64] = 0  # groups of zeros
        exact = quantized_product(x, weight)
        result = function(x, weight, act_qtype="int8")
        np.testing.assert_allclose(result, exact, rtol=0, atol=1e-5 * np.abs(exact).max())
        # And it is what quantization costs, not something else.
        assert np.abs(result - x @ expected_weight(weight).T).max() < 0.02 * np.abs(exact).max()

    @pytest.mark.sampled(3)
    def test_in_bfloat16(self, scheme, rows, function):
        x, weight = jnp.asarray(random(rows, 96, seed=1), jnp.bfloat16), quantize(random(11, 96), WeightScheme(*scheme))
        exact = np.asarray(x, np.float64) @ expected_weight(weight).T
        result = function(x, weight)
        assert result.dtype == jnp.bfloat16
        np.testing.assert_allclose(result.astype(np.float32), exact, rtol=0, atol=0.02 * np.abs(exact).max())
        assert function(x, weight, act_qtype="int8", preferred_element_type=jnp.float32).dtype == jnp.float32
