"""Rows of a table of embeddings that is divided between devices.

XLA may gather the whole table on each device for the few rows of a step. So each device looks up the rows that it has,
and one sum over the devices follows.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from jaxis.kernels.weights.operations import Weight, operations_of
from jaxis.kernels.weights.shards import MODEL_AXIS, is_divided, num_shards, shard_specs
from jaxis.parallel.mesh import on_each_device


def lookup_on_shards(ids: jax.Array, weight: Weight, dtype: DTypeLike, axis: str | None) -> jax.Array | None:
    """Rows of a weight whose rows are divided between devices: the same numbers as on one device.

    Args:
      ids: i32 [T]; those out of range are clipped.
      weight: Stands for [out, in].
      dtype: A float type, of the result.
      axis: Logical axis of the weight's `out`.

    Returns:
      [T, in]; None if the current mesh does not divide these rows.
    """
    shards = num_shards()
    if shards is None or not is_divided(axis):
        return None
    if (specs := shard_specs(weight, -2, shards)) is None:
        return None
    rows_per_shard = weight.shape[0] // shards

    def on_shard(ids: jax.Array, of_shard: Any) -> jax.Array:
        row = ids - jax.lax.axis_index(MODEL_AXIS) * rows_per_shard
        rows = operations_of(of_shard).lookup(row, of_shard, dtype)
        is_here = (row >= 0) & (row < rows_per_shard)
        # One device adds a row to the others' zeros, so the sum is exact in any order.
        return jax.lax.psum(jnp.where(is_here[:, None], rows, 0), MODEL_AXIS)

    everywhere = PartitionSpec()
    ids = jnp.clip(ids, 0, weight.shape[0] - 1)
    return on_each_device(on_shard, (everywhere, specs), everywhere)(ids, weight)
