"""Affine quantization: what it returns, and that its squared error is close to the least there is."""

from __future__ import annotations

import numpy as np
import pytest

from jaxis.kernels.weights import CodedWeight, PackedWeight, WeightScheme, pack, quantize
from jaxis.kernels.weights.scale_codes import find_codes
from tests.support.dequantized import dequantize

BITS = {"int4": 4, "int5": 5, "int6": 6}
bits = pytest.mark.parametrize("qtype", BITS)


def random(rows: int, columns: int) -> np.ndarray:
    return np.random.default_rng(rows).standard_normal((rows, columns)).astype(np.float32)


def restored(weight: CodedWeight) -> np.ndarray:
    """The elements, float64 [out, in], from the arrays as their descriptions say."""
    rows, columns = weight.shape
    codes = np.stack([weight.codes & 0xF, weight.codes >> 4], axis=-1).reshape(rows, columns).astype(np.int64)
    if weight.high is not None:
        flat = np.unpackbits(weight.high, axis=1, bitorder="little").reshape(rows, columns, -1)
        codes += 16 * (flat * 2 ** np.arange(flat.shape[-1])).sum(axis=-1)
    scale, minimum = weight.scale * weight.super_scale.astype(np.float64), weight.minimum * weight.super_minimum
    grouped = codes.reshape(*scale.shape, -1) * scale[..., None] + minimum[..., None]
    return grouped.reshape(rows, columns)


def least_error(group: np.ndarray, largest_code: int) -> float:
    """The least squared error of a group among many guesses, with the regression of the values on each one's codes."""
    low, width = group.min(), np.ptp(group)
    errors = []
    for candidate in np.linspace(-3, 3, 121):
        codes = np.clip(np.rint((group - low) * (largest_code + candidate) / width), 0, largest_code)
        fit = np.polyval(np.polyfit(codes, group, 1), codes)
        errors.append(np.square(fit - group).sum())
    return min(errors)


@pytest.mark.sampled(4)
@bits
def test_the_squared_error_is_close_to_the_least(qtype: str) -> None:
    weight = random(6, 256)
    error = np.square(restored(quantize(weight, WeightScheme(qtype, 32, "affine"))) - weight).sum()
    groups = weight.astype(np.float64).reshape(-1, 32)
    least = sum(least_error(group, 2 ** BITS[qtype] - 1) for group in groups)
    # The rest is that scales and minima have 8 bits, which weighs more the finer the codes are.
    assert least * 0.98 < error < least * {"int4": 1.03, "int5": 1.12, "int6": 1.25}[qtype]


def test_int4_beats_the_other_methods() -> None:
    weight = random(64, 512)

    def error(method: str) -> float:
        quantized = quantize(weight, WeightScheme("int4", 32, method))
        return float(np.square(np.asarray(dequantize(quantized)) - weight).mean())

    assert error("affine") < 0.8 * error("minmax")
    assert error("affine") < 0.75 * error("mse")


@pytest.mark.sampled(4)
@bits
@pytest.mark.parametrize("group_size", [16, 32, 64, 128, None])
def test_scales_and_minima_are_codes_times_a_power_of_two(qtype: str, group_size: int | None) -> None:
    weight = quantize(random(9, 256), WeightScheme(qtype, group_size, "affine", "int8"))
    assert isinstance(weight, CodedWeight)
    assert (weight.bits, weight.act_qtype, weight.group_size) == (BITS[qtype], "int8", group_size or 256)
    assert (weight.scale.dtype, weight.minimum.dtype) == (np.uint8, np.int8)
    for unit in (weight.super_scale, weight.super_minimum):
        assert unit.shape == (9, 1)
        assert (np.frexp(unit)[0] == 0.5).all()
    assert (weight.scale.max(axis=1) >= 128).all()
    np.testing.assert_allclose(dequantize(weight), restored(weight), rtol=1e-6, atol=1e-6)


@bits
def test_extreme_rows(qtype: str) -> None:
    weight = random(8, 128)
    weight[0] = 0
    weight[1] *= 1e-30
    weight[2] *= 1e30
    weight[3, 64:] = 0
    weight[4, :64] = 0.75  # a group without a range
    weight[5, 7] = 100  # an outlier
    weight[6, :64] += 50
    weight[7] = 1e-40  # denormal
    value = restored(quantize(weight, WeightScheme(qtype, 64, "affine")))
    assert np.isfinite(value).all()
    assert (value[[0, 7]] == 0).all()
    assert (value[3, 64:] == 0).all()
    largest = np.abs(weight.reshape(8, 2, 64)).max(axis=-1).repeat(64, axis=1)
    # A step is up to twice the largest magnitude over the largest code; ends may be clipped by as much.
    tolerance = 2.0 ** (1 - BITS[qtype]) * largest + np.abs(weight).max(axis=1, keepdims=True) / 127
    assert (np.abs(value - weight)[:7] <= tolerance[:7]).all()
    np.testing.assert_allclose(value[4, :64], 0.75, rtol=0.01)


@bits
def test_a_row_does_not_depend_on_the_others(qtype: str) -> None:
    weight, scheme = random(70, 96), WeightScheme(qtype, 32, "affine")
    whole = quantize(weight, scheme)
    for row in (0, 13, 69):
        alone = quantize(weight[row : row + 1], scheme)
        np.testing.assert_array_equal(restored(alone)[0], restored(whole)[row])


class TestFindCodes:
    def test_products_are_found(self) -> None:
        rng = np.random.default_rng(0)
        codes, minima = rng.integers(0, 256, (20, 12)), rng.integers(-127, 128, (20, 12))
        unit = np.exp2(rng.integers(-126, 100, (20, 1))).astype(np.float32)
        codes[:, 0], minima[:, 0] = 255, -127
        codes[5] = 0
        for numbers, are_minima in ((codes, False), (minima, True)):
            products = (numbers * unit).astype(np.float32)
            found, units = find_codes(products, are_minima=are_minima)
            np.testing.assert_array_equal(found * units, products)
            assert found.dtype == (np.int8 if are_minima else np.uint8)
            np.testing.assert_array_equal(np.delete(found, 5, 0), np.delete(numbers, 5, 0))

    @pytest.mark.parametrize("number", [1.001, 256.5, 1e-4, -1.0, np.inf, np.nan, 1e-40])
    def test_others_are_not(self, number: float) -> None:
        assert find_codes(np.asarray([[200.0, 3.0], [100.0, number]], np.float32)) is None


def test_such_scales_are_packed_in_8_bits_whatever_their_type() -> None:
    for scheme, bytes_of_group in ((WeightScheme("int8", 32), 33), (WeightScheme("int4", 32, "affine"), 18)):
        weight = quantize(random(32, 128), scheme)
        packed = pack(weight)
        if not isinstance(packed, PackedWeight):
            pytest.skip("needs the native kernels")
        per_row = 4 if scheme.weight_qtype == "int8" else 8
        assert packed.nbytes == 32 * (4 * bytes_of_group + per_row)
        np.testing.assert_array_equal(dequantize(packed), dequantize(weight))
