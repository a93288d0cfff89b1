"""The values that a quantized weight can have: a scale and a minimum for each group of columns."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxis.kernels.weights.scale_codes import MINIMUM_BITS, SCALE_BITS, unit_of

# Divisors for guesses of a scale: a group's range over the largest code plus one of these. Negative ones clip the
# range.
_CANDIDATES = (-1.0, -0.6, -0.2, 0.2, 0.6, 1.0, 1.4)
_LARGEST_SCALE_CODE, _LARGEST_MINIMUM_CODE = (1 << SCALE_BITS) - 1, (1 << MINIMUM_BITS) - 1
_TINY = 1e-30


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class AffineGrid:
    """Grid of values `scale * code + minimum`. In each row, both are integers times a power of two.

    Attributes:
      scale, minimum: float32 [out, groups].
      scale_unit: float32 [out, 1]; scales are 1 to 255 times the unit.
      minimum_unit: float32 [out, 1]; minima are -127 to 127 times the unit.
    """

    scale: jax.Array
    minimum: jax.Array
    scale_unit: jax.Array
    minimum_unit: jax.Array

    def round_scale(self, scale: jax.Array) -> jax.Array:
        return jnp.clip(jnp.round(scale / self.scale_unit), 1, _LARGEST_SCALE_CODE) * self.scale_unit

    def round_minimum(self, minimum: jax.Array) -> jax.Array:
        codes = jnp.clip(jnp.round(minimum / self.minimum_unit), -_LARGEST_MINIMUM_CODE, _LARGEST_MINIMUM_CODE)
        return codes * self.minimum_unit


@functools.partial(jax.jit, static_argnames=("bits", "group_size"))
def fit_grid(weight: jax.Array, importance: jax.Array, *, bits: int, group_size: int) -> AffineGrid:
    """Returns the grid with the least squared error of a weight, float32 [out, in], where columns count by importance.

    The importance, float32 [in], is positive: the mean square of each input. A group's columns share a scale and a
    minimum; `group_size` divides `in`.
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
    """Returns the best scale and minimum [out, groups] for x [out, groups, group size]; those of a grid, if given."""
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
