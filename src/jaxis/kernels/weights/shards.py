"""How a weight is divided between the devices of the current mesh, for functions that run on each device's own part."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, PartitionSpec

from jaxis.kernels.grouped_matmul.stored import StoredStack, stored_stack
from jaxis.kernels.native_constants import ACTIVATION_GROUP
from jaxis.kernels.quantized_matmul.weight import QuantizedWeight
from jaxis.kernels.weights.operations import Weight
from jaxis.parallel.mesh import LOGICAL_AXIS_RULES

MODEL_AXIS = LOGICAL_AXIS_RULES["mlp"]
"""The mesh axis that features are divided over."""


def num_shards() -> int | None:
    """Devices that share the current mesh's features; None if there is one, or if other axes or XLA's are in use."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.size <= 1 or any(kind != AxisType.Auto for kind in mesh.axis_types):
        return None
    return mesh.size if mesh.shape[MODEL_AXIS] == mesh.size else None


def shard_specs(weight: Weight, axis: int, shards: int) -> Any:
    """Where a weight's arrays [..., out, in] are divided if one of the last two axes is.

    Args:
      weight: The weight, or a stack of weights.
      axis: -2 for the outputs, -1 for the features.
      shards: Into how many parts.

    Returns:
      A PartitionSpec for each of its arrays; None if a part would not be a weight itself, or no kernel knows its type.
    """
    is_stack = len(weight.shape) > 2
    stack = stored_stack(weight if is_stack else jax.tree.map(lambda array: jnp.asarray(array)[None], weight))
    if stack is None or not _is_divisible(stack, axis, shards):
        return None
    quantizes_input = isinstance(weight, QuantizedWeight) and weight.act_qtype is not None
    # Inputs are quantized in groups of features, which have to be whole.
    if quantizes_input and axis == -1 and stack.shape[2] % (shards * ACTIVATION_GROUP):
        return None

    def spec(array: jax.Array | np.ndarray) -> PartitionSpec:
        # An axis of 1 is one scale for all.
        divided = array.ndim + axis if array.shape[axis] > 1 else None
        return PartitionSpec(*(MODEL_AXIS if i == divided else None for i in range(array.ndim)))

    return jax.tree.map(spec, weight)


def _is_divisible(stack: StoredStack, axis: int, shards: int) -> bool:
    """Whether shards of equal size hold whole blocks and bytes."""
    if stack.elements.shape[axis] % shards:
        return False
    if stack.scale is None or stack.scale.shape[axis] == 1:
        return True
    return stack.shape[axis] % (stack.block_shape[axis] * shards) == 0
