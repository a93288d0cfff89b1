"""Quantization of a weight for its inputs on calibration text."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from jaxis.calibration.affine_grid import fit_grid
from jaxis.calibration.error_feedback import ErrorFeedback, damped, round_in_order
from jaxis.kernels.grouped_matmul.stored import INT4_OFFSET
from jaxis.kernels.weights import CodedWeight, QuantizedWeight, WeightScheme
from jaxis.kernels.weights.affine import affine_weight
from jaxis.kernels.weights.quantize import quantize_to_integers
from jaxis.kernels.weights.scheme import BITS, NOT_FINITE


@dataclass(frozen=True)
class InputStatistics:
    """Statistics of an input, shared by the weights that are multiplied with it.

    Attributes:
      importance: float32 [in], mean square of each feature, damped.
    """

    importance: np.ndarray
    feedback: ErrorFeedback

    @classmethod
    def of(cls, moments: np.ndarray) -> InputStatistics:
        """Computes the statistics from the mean of x x^T, [in, in], over inputs x."""
        positive = damped(moments)
        return cls(np.diag(positive).astype(np.float32), ErrorFeedback.of(positive))


def quantize_calibrated(
    weight: np.ndarray, scheme: WeightScheme, statistics: InputStatistics
) -> QuantizedWeight | CodedWeight:
    """Quantizes a weight so that its products with such inputs change as little as possible, rather than its elements.

    `weight` [out, in] has any float type. The scales of "affine" are also chosen for the products; others are as in
    `quantize`, and so are the type of the result, of NumPy arrays, and errors (ValueError).
    """
    if scheme.weight_calibration_method == "affine":
        return _quantize_affine(weight, scheme, statistics)
    return _quantize_integers(weight, scheme, statistics)


def _quantize_affine(weight: np.ndarray, scheme: WeightScheme, statistics: InputStatistics) -> CodedWeight:
    if not np.isfinite(weight).all():
        raise ValueError(NOT_FINITE)
    wide, bits = jnp.asarray(weight, jnp.float32), BITS[scheme.weight_qtype]
    group_size = scheme.group_size or weight.shape[1]
    grid = fit_grid(wide, jnp.asarray(statistics.importance), bits=bits, group_size=group_size)
    arrays = (
        _codes(wide, grid.scale, grid.minimum, statistics, (1 << bits) - 1),
        np.asarray(grid.scale / grid.scale_unit).astype(np.uint8),
        np.asarray(grid.scale_unit),
        np.asarray(grid.minimum / grid.minimum_unit).astype(np.int8),
        np.asarray(grid.minimum_unit),
    )
    return affine_weight(arrays, bits, scheme.act_qtype)


def _quantize_integers(weight: np.ndarray, scheme: WeightScheme, statistics: InputStatistics) -> QuantizedWeight:
    plain = quantize_to_integers(weight, scheme)
    # A scale is 0 where all elements are; scales of "mse" may be negative.
    scale = jnp.asarray(plain.scale, jnp.float32)
    scale = jnp.where(scale == 0, jnp.finfo(jnp.float32).tiny, scale)
    lowest, largest = (-127, 254) if plain.qtype == "int8" else (-INT4_OFFSET, 15)
    zero_point = -lowest if plain.zero_point is None else jnp.asarray(plain.zero_point, jnp.float32)
    codes = _codes(jnp.asarray(weight, jnp.float32), scale, -scale * zero_point, statistics, largest)
    if plain.qtype == "int8":
        return dataclasses.replace(plain, qvalue=(codes.astype(np.int16) + lowest).astype(np.int8))
    return dataclasses.replace(plain, qvalue=codes[:, 0::2] | codes[:, 1::2] << 4)


def _codes(
    weight: jax.Array, scale: jax.Array, minimum: jax.Array, statistics: InputStatistics, largest: int
) -> np.ndarray:
    feedback = statistics.feedback
    return np.asarray(round_in_order(weight, scale, minimum, feedback.order, feedback.factors, largest=largest))
