"""Division of kernels with independent heads or channels over the devices of the mesh axis "model"."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxis.kernels.state_slots import Operands
from jaxis.parallel.mesh import MODEL_AXIS, on_each_device


def num_shards(num_heads: int) -> int:
    """Returns the number of devices of the current mesh that this many heads are split over: its axis "model", or 1."""
    mesh = jax.sharding.get_abstract_mesh()
    devices = 1 if mesh.empty else mesh.shape[MODEL_AXIS]
    return devices if num_heads % devices == 0 else 1


def split_over_model(
    function: Callable[[Operands], Any], operands: Operands, axes: Sequence[int | None], out_axes: Sequence[int]
) -> Any:
    """Runs `function`, from the operands of a recurrent kernel to a tuple, on each device's part of them.

    `axes` has the axis along which each operand, and last the array of states, is split (None: every device gets all of
    it), and `out_axes` the axis along which the devices' parts of each result are joined.
    """
    *specs, of_states = map(_spec, axes)
    everywhere = PartitionSpec()
    states = operands.states._make([of_states, everywhere, everywhere, everywhere])
    return on_each_device(function, (operands._make([*specs, states]),), tuple(map(_spec, out_axes)))(operands)


def _spec(axis: int | None) -> PartitionSpec:
    return PartitionSpec() if axis is None else PartitionSpec(*[None] * axis, MODEL_AXIS)


def repeat_groups(x: jax.Array, shards: int) -> jax.Array:
    """Repeats groups [T, G, N] that heads share, until every shard has the groups of its heads."""
    num_groups = x.shape[1]
    return jnp.repeat(x, shards // math.gcd(num_groups, shards), axis=1)
