"""Rows of a weight in another order, some of them several times or not at all."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np

from jaxis.kernels.quantized_matmul.block_scaled import BlockScaledWeight
from jaxis.kernels.quantized_matmul.packed import PackedWeight
from jaxis.kernels.quantized_matmul.reordered import ReorderedWeight
from jaxis.kernels.weights.operations import Weight


def take_rows(weight: Weight, rows: np.ndarray) -> Weight:
    """The weight whose outputs are these of a weight's, in this order.

    Args:
      weight: Stands for [out, in]; not packed for the native kernels.
      rows: int [n], indices of outputs.

    Returns:
      A weight of the same type that stands for [n, in]. Blocks that share a scale are cut where `rows` cuts them.

    Raises:
      TypeError: The weight is packed.
    """
    if isinstance(weight, PackedWeight):
        raise TypeError("rows of a packed weight cannot be taken one by one")
    if isinstance(weight, ReorderedWeight):
        return dataclasses.replace(weight, weight=take_rows(weight.weight, rows))
    if isinstance(weight, BlockScaledWeight):
        return _take_rows_of_blocks(weight, rows)
    return jax.tree.map(lambda array: _take(array, rows), weight)


def _take_rows_of_blocks(weight: BlockScaledWeight, rows: np.ndarray) -> BlockScaledWeight:
    block_rows, block_columns = weight.block_shape
    value = _take(weight.value, rows)
    if weight.scale.shape[0] == 1:  # one scale for all
        return BlockScaledWeight(value, weight.scale, (max(block_rows, len(rows)), block_columns))
    # Each run of neighbouring rows consists of whole pieces of this size.
    begins = np.flatnonzero(np.diff(rows, prepend=-2) != 1)
    piece = math.gcd(block_rows, len(rows), *begins.tolist(), *rows[begins].tolist())
    scale = _take(weight.scale, rows[::piece] // block_rows)
    return BlockScaledWeight(value, scale, (piece, block_columns))


def _take(array: jax.Array | np.ndarray, rows: np.ndarray) -> jax.Array:
    return jnp.take(jnp.asarray(array), rows, axis=0)
