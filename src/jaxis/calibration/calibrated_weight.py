"""A weight that is quantized for the activations that it meets: its grid, and how its codes are rounded."""

from __future__ import annotations

import dataclasses
import functools
import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from jaxis.kernels.grouped_matmul.stored import INT4_OFFSET
from jaxis.kernels.weights import CodedWeight, QuantizedWeight, WeightScheme
from jaxis.kernels.weights.affine import affine_weight
from jaxis.kernels.weights.quantize import quantize_to_integers
from jaxis.kernels.weights.scale_codes import MINIMUM_BITS, SCALE_BITS, unit_of
from jaxis.kernels.weights.scheme import BITS, NOT_FINITE

# The values that a quantized weight can have: a scale and a minimum for each group of columns.


# Guesses of a scale are a group's range over the largest code plus one of these; below 0 they clip its ends.
_CANDIDATES = (-1.0, -0.6, -0.2, 0.2, 0.6, 1.0, 1.4)
_LARGEST_SCALE_CODE, _LARGEST_MINIMUM_CODE = (1 << SCALE_BITS) - 1, (1 << MINIMUM_BITS) - 1
_TINY = 1e-30


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class AffineGrid:
    """Element = `scale * code + minimum`, where both are integers times a power of two of their row.

    Attributes:
      scale, minimum: float32 [out, groups].
      scale_unit: float32 [out, 1]; scales are 1 to 255 times it.
      minimum_unit: float32 [out, 1]; minima are -127 to 127 times it.
    """

    scale: jax.Array
    minimum: jax.Array
    scale_unit: jax.Array
    minimum_unit: jax.Array

    def round_scale(self, scale: jax.Array) -> jax.Array:
        """The nearest scale that there is, for scales [out, groups]."""
        return jnp.clip(jnp.round(scale / self.scale_unit), 1, _LARGEST_SCALE_CODE) * self.scale_unit

    def round_minimum(self, minimum: jax.Array) -> jax.Array:
        """The nearest minimum that there is."""
        codes = jnp.clip(jnp.round(minimum / self.minimum_unit), -_LARGEST_MINIMUM_CODE, _LARGEST_MINIMUM_CODE)
        return codes * self.minimum_unit


@functools.partial(jax.jit, static_argnames=("bits", "group_size"))
def fit_grid(weight: jax.Array, importance: jax.Array, *, bits: int, group_size: int) -> AffineGrid:
    """The grid on which a weight has the least squared error, each column's errors weighted by its importance.

    Args:
      weight: float32 [out, in].
      importance: float32 [in], positive: the mean square of each input.
      bits: Bits of a code.
      group_size: Columns that share a scale and a minimum; divides `in`.
    """
    x = weight.reshape(weight.shape[0], -1, group_size)
    columns = (importance / importance.mean()).reshape(1, -1, group_size)
    largest = (1 << bits) - 1
    scale, minimum = _search(x, columns, largest, None)
    grid = AffineGrid(
        scale,
        minimum,
        unit_of(jnp.maximum(scale.max(axis=1, keepdims=True), _TINY), SCALE_BITS),
        unit_of(jnp.maximum(jnp.abs(minimum).max(axis=1, keepdims=True), _TINY), MINIMUM_BITS),
    )
    scale, minimum = _search(x, columns, largest, grid)
    return AffineGrid(scale, minimum, grid.scale_unit, grid.minimum_unit)


def _search(x: jax.Array, columns: jax.Array, largest: int, rounding: AffineGrid | None) -> tuple[jax.Array, jax.Array]:
    """The best scale and minimum [out, groups] for x [out, groups, group size]; those of `rounding`, if given."""
    low, high = x.min(-1), x.max(-1)
    total, total_x = columns.sum(-1), (columns * x).sum(-1)
    best_scale, best_minimum, best_error = low, low, jnp.full_like(low, jnp.inf)
    for candidate in _CANDIDATES:
        step = jnp.maximum((high - low) / (largest + candidate), _TINY)
        q = jnp.clip(jnp.round((x - low[..., None]) / step[..., None]), 0, largest)
        weighted = columns * q
        sum_q, sum_qq, sum_qx = weighted.sum(-1), (weighted * q).sum(-1), (weighted * x).sum(-1)
        determinant = total * sum_qq - sum_q * sum_q
        scale = (total * sum_qx - sum_q * total_x) / jnp.maximum(determinant, _TINY)
        scale = jnp.where(determinant > 1e-6 * total * sum_qq, jnp.maximum(scale, _TINY), step)
        if rounding is not None:
            scale = rounding.round_scale(scale)
        minimum = (total_x - scale * sum_q) / total
        if rounding is not None:
            minimum = rounding.round_minimum(minimum)
        q = jnp.clip(jnp.round((x - minimum[..., None]) / scale[..., None]), 0, largest)
        error = (columns * (q * scale[..., None] + minimum[..., None] - x) ** 2).sum(-1)
        is_better = error < best_error
        best_scale = jnp.where(is_better, scale, best_scale)
        best_minimum = jnp.where(is_better, minimum, best_minimum)
        best_error = jnp.minimum(error, best_error)
    return best_scale, best_minimum


# Rounding of a weight so that the errors of its columns cancel in its products (GPTQ, arXiv:2210.17323).


_DAMPING = 0.01
_BLOCK = 32


def damped(moments: np.ndarray) -> np.ndarray:
    """Second moments [in, in] with a hundredth of their diagonal's mean added to it: positive definite, float64.

    An input that is never anything but 0 thus counts a little, and its weights are rounded to the nearest value.
    """
    wide = moments.astype(np.float64)
    mean = np.diag(wide).mean()
    return wide + np.eye(len(wide)) * (_DAMPING * mean if mean > 0 else 1.0)


@dataclass(frozen=True)
class ErrorFeedback:
    """How much of the error of each column is added to those that are rounded after it.

    Attributes:
      order: int32 [in], the columns in the order of rounding, the one with the largest inputs first.
      factors: float32 [in, in], strictly upper triangular, in that order: [i, j] of the error of column i is added to
        column j.
    """

    order: np.ndarray
    factors: np.ndarray

    @classmethod
    def of(cls, moments: np.ndarray) -> ErrorFeedback:
        """The feedback for inputs with these second moments, float [in, in], positive definite.

        GPTQ takes it from the inverse of the moments; it is the same as the unit upper triangular factor of the moments
        themselves (arXiv:2307.13304, theorem 6), which needs no inverse.
        """
        order = np.argsort(-np.diag(moments), kind="stable")
        permuted = moments[np.ix_(order, order)].astype(np.float64)
        # The lower factor of the matrix with its rows and columns reversed is the upper one of the matrix.
        upper = np.linalg.cholesky(permuted[::-1, ::-1])[::-1, ::-1]
        factors = upper / np.diag(upper)
        np.fill_diagonal(factors, 0)
        return cls(order.astype(np.int32), factors.astype(np.float32))


@functools.partial(jax.jit, static_argnames="largest")
def round_in_order(
    weight: jax.Array,
    scale: jax.Array,
    minimum: jax.Array,
    order: jax.Array,
    factors: jax.Array,
    *,
    largest: int,
) -> jax.Array:
    """Codes uint8 [out, in], rounded column by column with feedback of the errors.

    Args:
      weight: float32 [out, in].
      scale: float32 [out, groups], not 0; a code stands for `scale * code + minimum`.
      minimum: float32 [out, groups].
      order: See `ErrorFeedback`.
      factors: See `ErrorFeedback`.
      largest: The largest code.
    """
    rows, columns = weight.shape
    size = math.gcd(columns, _BLOCK)
    groups = order // (columns // scale.shape[1])
    blocks = tuple(each.T.reshape(-1, size, rows) for each in (weight[:, order], scale[:, groups], minimum[:, groups]))

    def round_block(errors: jax.Array, block: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        start, target, steps, low = block
        spread = jax.lax.dynamic_slice(factors, (0, start), (columns, size))
        own = jax.lax.dynamic_slice(spread, (start, 0), (size, size))
        fed = target + spread.T @ errors

        def round_column(i: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            fed, errors, codes = state
            code = jnp.clip(jnp.round((fed[i] - low[i]) / steps[i]), 0, largest)
            error = target[i] - (code * steps[i] + low[i])
            return fed + own[i][:, None] * error[None], errors.at[i].set(error), codes.at[i].set(code)

        nothing = jnp.zeros_like(target)
        _, found, codes = jax.lax.fori_loop(0, size, round_column, (fed, nothing, nothing))
        return jax.lax.dynamic_update_slice(errors, found, (start, 0)), codes.astype(jnp.uint8)

    starts = jnp.arange(columns // size) * size
    _, codes = jax.lax.scan(round_block, jnp.zeros((columns, rows)), (starts, *blocks))
    return jnp.zeros((columns, rows), jnp.uint8).at[order].set(codes.reshape(columns, rows)).T


# Quantizes a weight for the inputs that it is multiplied with.


@dataclass(frozen=True)
class InputStatistics:
    """What is known of an input, shared by the weights that are multiplied with it.

    Attributes:
      importance: float32 [in], the mean square of each feature, damped.
      feedback: How rounding errors are compensated.
    """

    importance: np.ndarray
    feedback: ErrorFeedback

    @classmethod
    def of(cls, moments: np.ndarray) -> InputStatistics:
        """The statistics for the mean of x x^T, [in, in], over inputs x."""
        positive = damped(moments)
        return cls(np.diag(positive).astype(np.float32), ErrorFeedback.of(positive))


def quantize_calibrated(
    weight: np.ndarray, scheme: WeightScheme, statistics: InputStatistics
) -> QuantizedWeight | CodedWeight:
    """Quantizes a weight so that its products with such inputs, not its elements, change as little as possible.

    Args:
      weight: [out, in], of any float type.
      scheme: Its types. The scales of "affine" are chosen for the products too; others are as `quantize` chooses them.
      statistics: Of the input.

    Returns:
      A weight of numpy arrays, of the type that `quantize` returns.

    Raises:
      ValueError: See `quantize`.
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
    # A scale is 0 where all elements are; those of "mse" may be negative.
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
