"""Kernels whose heads or channels are independent of each other, on the devices of the mesh axis "model"."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxis.parallel.mesh import MODEL_AXIS, on_each_device


def num_shards(num_heads: int) -> int:
    """Over how many devices of the current mesh so many heads are split: all of its axis "model", or one."""
    mesh = jax.sharding.get_abstract_mesh()
    devices = 1 if mesh.empty else mesh.shape[MODEL_AXIS]
    return devices if num_heads % devices == 0 else 1


def split_over_model(
    function: Callable[..., Any], operands: Sequence[Any], axes: Sequence[int | None], out_axes: Sequence[int]
) -> Any:
    """Runs `function` on each device's own part of the operands.

    Args:
      function: From the operands to a tuple of arrays.
      operands: Arrays, pytrees of them, or None.
      axes: The axis along which each operand is split; None: every device gets all of it.
      out_axes: The axis along which the devices' parts of each result are put together.
    """
    return on_each_device(function, tuple(map(_spec, axes)), tuple(map(_spec, out_axes)))(*operands)


def _spec(axis: int | None) -> PartitionSpec:
    return PartitionSpec() if axis is None else PartitionSpec(*[None] * axis, MODEL_AXIS)


def repeat_groups(x: jax.Array, shards: int) -> jax.Array:
    """Groups [T, G, N] that heads share, each as often as it takes for every shard to have its heads' groups."""
    num_groups = x.shape[1]
    return jnp.repeat(x, shards // math.gcd(num_groups, shards), axis=1)
