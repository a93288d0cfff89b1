"""Rounding of a weight so that the errors of its columns cancel in its products (GPTQ, arXiv:2210.17323)."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

_DAMPING = 0.01
_BLOCK = 32


def damped(moments: np.ndarray) -> np.ndarray:
    """Adds a hundredth of their diagonal's mean to second moments [in, in]: positive definite, float64.

    An input that is always 0 thus counts a little, and its weights are rounded to the nearest value.
    """
    wide = moments.astype(np.float64)
    mean = np.diag(wide).mean()
    return wide + np.eye(len(wide)) * (_DAMPING * mean if mean > 0 else 1.0)


@dataclass(frozen=True)
class ErrorFeedback:
    """Shares of each column's rounding error (the original weight less the rounded one) that later columns get added.

    Attributes:
      order: int32 [in], columns in the order of rounding, the one with the largest second moment of its input first.
      factors: float32 [in, in], strictly upper triangular, in that order: factor [i, j] of column i's error goes to
        column j.
    """

    order: np.ndarray
    factors: np.ndarray

    @classmethod
    def of(cls, moments: np.ndarray) -> ErrorFeedback:
        """Computes the feedback for inputs with these second moments, float [in, in], positive definite.

        GPTQ computes it from the inverse of the moments. It equals the unit upper triangular factor of the moments
        themselves (arXiv:2307.13304, theorem 6), which needs no inverse.
        """
        order = np.argsort(-np.diag(moments), kind="stable")
        permuted = moments[np.ix_(order, order)].astype(np.float64)
        # The lower factor of the matrix with reversed rows and columns is the upper factor of the matrix.
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
    """Rounds a weight, float32 [out, in], to codes uint8, column by column with feedback of the errors.

    A code means `scale * code + minimum`, both float32 [out, groups], the scale not 0. Order and factors are those of
    `ErrorFeedback`; `largest` is the largest code.
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
