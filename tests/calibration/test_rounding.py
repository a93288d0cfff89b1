"""Rounding with feedback of errors, against the algorithm as published."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxis.calibration.calibrated_weight import InputStatistics, quantize_calibrated
from jaxis.calibration.error_feedback import ErrorFeedback, damped, round_in_order
from jaxis.kernels.weights import WeightScheme, dequantize, quantize

COLUMNS, ROWS, GROUP = 96, 7, 32


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def correlated_inputs(rng, count=400):
    """Inputs whose features are correlated and of very different sizes."""
    mixed = rng.standard_normal((count, COLUMNS)) @ rng.standard_normal((COLUMNS, COLUMNS))
    return (mixed * np.exp(rng.standard_normal(COLUMNS))).astype(np.float32)


def gptq(weight, scale, minimum, moments, largest):
    """Algorithm 1 of arXiv:2210.17323, one column at a time, in float64, largest diagonal first."""
    order = np.argsort(-np.diag(moments), kind="stable")
    inverse = np.linalg.inv(moments[np.ix_(order, order)])
    factor = np.linalg.cholesky(inverse).T
    w = weight[:, order].astype(np.float64)
    codes = np.zeros(weight.shape, np.uint8)
    for j, column in enumerate(order):
        s, m = scale[:, column // GROUP], minimum[:, column // GROUP]
        code = np.clip(np.rint((w[:, j] - m) / s), 0, largest)
        error = (w[:, j] - (code * s + m)) / factor[j, j]
        w[:, j:] -= np.outer(error, factor[j, j:])
        codes[:, column] = code
    return codes


def test_codes_are_those_of_the_published_algorithm(rng):
    x = correlated_inputs(rng)
    moments = damped(x.T @ x / len(x))
    weight = rng.standard_normal((ROWS, COLUMNS)).astype(np.float32)
    scale = rng.uniform(0.2, 0.4, (ROWS, COLUMNS // GROUP)).astype(np.float32)
    minimum = -scale * 7.3
    feedback = ErrorFeedback.of(moments)
    codes = round_in_order(
        jnp.asarray(weight), jnp.asarray(scale), jnp.asarray(minimum), feedback.order, feedback.factors, largest=15
    )
    assert np.array_equal(codes, gptq(weight, scale, minimum, moments, 15))


def test_without_correlation_every_value_is_rounded_to_the_nearest(rng):
    weight = rng.standard_normal((ROWS, COLUMNS)).astype(np.float32)
    scale = np.full((ROWS, 3), 0.3, np.float32)
    feedback = ErrorFeedback.of(np.diag(rng.uniform(1, 2, COLUMNS)))
    codes = round_in_order(
        jnp.asarray(weight), jnp.asarray(scale), jnp.asarray(-8 * scale), feedback.order, feedback.factors, largest=15
    )
    assert np.array_equal(codes, np.clip(np.rint(weight / np.float32(0.3) + 8), 0, 15))


SCHEMES = {
    "int4 affine": WeightScheme("int4", 32, "affine", "int8"),
    "int5": WeightScheme("int5", 32, "affine"),
    "int6, rows": WeightScheme("int6", None, "affine"),
    "int4 mse": WeightScheme("int4", 32, "mse"),
    "int4 with zero points": WeightScheme("int4", 32, "minmax"),
    "int8": WeightScheme("int8", 32),
    "int8, rows": WeightScheme("int8"),
}


@pytest.mark.sampled
@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
def test_products_are_closer_than_those_of_the_plain_weight(rng, scheme):
    x = correlated_inputs(rng)
    weight = rng.standard_normal((64, COLUMNS)).astype(np.float32)
    plain = quantize(weight, scheme)
    calibrated = quantize_calibrated(weight, scheme, InputStatistics.of(x.T @ x / len(x)))
    assert type(calibrated) is type(plain)
    assert calibrated.shape == plain.shape
    assert calibrated.act_qtype == scheme.act_qtype
    held_out = correlated_inputs(np.random.default_rng(0))[:100]

    def error(quantized):
        return np.square(held_out @ (np.asarray(dequantize(quantized)) - weight).T).mean()

    assert error(calibrated) < 0.6 * error(plain)


@pytest.mark.sampled
@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
def test_rows_of_zeros_and_inputs_that_never_occur(rng, scheme):
    weight = rng.standard_normal((4, COLUMNS)).astype(np.float32)
    weight[1] = 0
    weight[2, :GROUP] = 0
    x = correlated_inputs(rng)
    x[:, 40:60] = 0
    quantized = quantize_calibrated(weight, scheme, InputStatistics.of(x.T @ x / len(x)))
    values = np.asarray(dequantize(quantized))
    assert np.abs(values[1]).max() < 1e-20
    assert np.isfinite(values).all()
    assert np.abs(values - weight).max() < 1


def test_a_weight_that_is_not_finite_is_an_error():
    weight = np.full((2, 32), np.nan, np.float32)
    with pytest.raises(ValueError, match="not finite"):
        quantize_calibrated(weight, WeightScheme("int4", 32, "affine"), InputStatistics.of(np.eye(32)))
