"""Products of rows with the weight of each row's group: what the experts of a mixture are made of."""

from __future__ import annotations

import functools

import jax

from jaxis.kernels.grouped_matmul import loop, reference
from jaxis.kernels.quantized_matmul import (
    BlockScaledWeight,
    QuantizedWeight,
    block_scaled_matmul,
    dequantize,
    quantized_matmul,
)
from jaxis.kernels.quantized_matmul.xla import round_activations

__all__ = ["GroupedWeight", "grouped_matmul"]

GroupedWeight = jax.Array | QuantizedWeight | BlockScaledWeight


def grouped_matmul(
    x: jax.Array, weight: GroupedWeight, group_sizes: jax.Array, *, act_qtype: str | None = None
) -> jax.Array:
    """`x[rows of group g] @ weight[g].T` for each group g; `reference.grouped_matmul` defines it.

    Args:
      x: [N, in], sorted by group.
      weight: [X, out, in]; a narrow one is a QuantizedWeight or a BlockScaledWeight of stacked arrays.
      group_sizes: i32 [X], how many rows each group has; their sum is at most N.
      act_qtype: "int8" quantizes x on the way, as for `quantized_matmul`; for a QuantizedWeight only.

    Returns:
      [N, out] in x's type; rows past the last group are 0.
    """
    if jax.default_backend() == "cpu":
        return loop.grouped_matmul(_multiply(act_qtype), _definition(act_qtype), x, weight, group_sizes)
    return _definition(act_qtype)(x, weight, group_sizes)


@functools.cache
def _multiply(act_qtype: str | None) -> loop.Product:
    def multiply(rows: jax.Array, weight: GroupedWeight) -> jax.Array:
        if isinstance(weight, QuantizedWeight):
            return quantized_matmul(rows, weight, act_qtype=act_qtype)
        if isinstance(weight, BlockScaledWeight):
            return block_scaled_matmul(rows, weight)
        return rows @ weight.T

    return multiply


@functools.cache
def _definition(act_qtype: str | None) -> loop.Grouped:
    def definition(x: jax.Array, weight: GroupedWeight, group_sizes: jax.Array) -> jax.Array:
        if isinstance(weight, QuantizedWeight) and act_qtype is not None:
            x = round_activations(x, weight)
        if isinstance(weight, QuantizedWeight | BlockScaledWeight):
            weight = dequantize(weight, x.dtype)
        return reference.grouped_matmul(x, weight, group_sizes)

    return definition
