"""Definition of the grouped product in plain JAX; differentiable."""

from __future__ import annotations

import jax

# x [N, in] with each group's rows adjacent, weight [X, out, in] -> [N, out].
_ROWS_BY_GROUP = jax.lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((1,), (2,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[0]
)


def grouped_matmul(x: jax.Array, weight: jax.Array, group_sizes: jax.Array) -> jax.Array:
    """Returns `x[rows of group g] @ weight[g].T` for each group g, [N, out]; rows past the last group are 0.

    x is [N, in], sorted by group; weight [X, out, in]; group_sizes i32 [X], the rows of each group, whose sum is at
    most N. XLA multiplies every row by every weight (CPU, GPU), or transposes the weights first (TPU).
    """
    return jax.lax.ragged_dot_general(x, weight, group_sizes, _ROWS_BY_GROUP)
