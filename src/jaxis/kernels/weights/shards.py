"""How a weight is divided between the devices of the current mesh, for functions that run on each device's own part."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jaxis.kernels.grouped_matmul.stored import StoredStack, stored_stack
from jaxis.kernels.native_constants import ACTIVATION_GROUP
from jaxis.kernels.quantized_matmul.block_scaled import BlockScaledWeight
from jaxis.kernels.quantized_matmul.coded import CodedWeight
from jaxis.kernels.quantized_matmul.weight import QuantizedWeight
from jaxis.kernels.weights.operations import Weight
from jaxis.parallel.mesh import LOGICAL_AXIS_RULES, MODEL_AXIS, automatic_axes, devices_of_layer

Axes = tuple[str | None, ...]


def num_shards() -> int | None:
    """Devices that share the current mesh's features; None if there is one, or inside of what runs on each of them."""
    if MODEL_AXIS not in automatic_axes() or devices_of_layer() == 1:
        return None
    return devices_of_layer()


def is_divided(axis: str | None) -> bool:
    """Whether devices have parts of this logical axis."""
    return axis is not None and MODEL_AXIS in LOGICAL_AXIS_RULES.get(axis, ())


def divided_axis(weight: Weight, axes: Axes) -> int | None:
    """Which axis of a weight [..., out, in] the current mesh divides, so that each part is a weight itself.

    Args:
      weight: The weight, or a stack of weights.
      axes: Its logical axes.

    Returns:
      -2 or -1: that of `axes`, but -2 in place of -1 if that would cut groups of columns that share a scale. None if it
      cannot be divided, or if `axes` divide both or none.
    """
    shards = num_shards()
    divided = [axis for axis in (-2, -1) if is_divided(axes[axis])]
    if shards is None or len(divided) != 1:
        return None
    return next((axis for axis in {divided[0]: None, -2: None} if shard_specs(weight, axis, shards) is not None), None)


def placement(weight: Weight, axes: Axes) -> Axes:
    """The logical axes by which the arrays of a weight are placed on the current mesh, for `divided_axis`."""
    axis = divided_axis(weight, axes) if isinstance(weight, QuantizedWeight | BlockScaledWeight | CodedWeight) else None
    if axis is None or is_divided(axes[axis]):
        return axes
    return (*axes[:-2], axes[-1], axes[-2])


def with_whole_blocks(weight: Weight, axes: Axes) -> Weight:
    """The weight, with smaller blocks if the current mesh would cut blocks of several rows and columns.

    Such blocks have few scales, which are repeated: blocks of 128 x 128 whose rows are divided between 64 devices.

    Args:
      weight: [out, in].
      axes: Its logical axes.
    """
    shards = num_shards()
    if shards is None or not isinstance(weight, BlockScaledWeight) or weight.block_shape[0] == 1:
        return weight
    scale, blocks = weight.scale, list(weight.block_shape)
    for axis, name in ((0, axes[-2]), (1, axes[-1])):
        size = weight.shape[axis]
        if not is_divided(name) or size % shards or scale.shape[axis] == 1:
            continue
        smaller = math.gcd(blocks[axis], size // shards)
        library: Any = jnp if isinstance(scale, jax.Array) else np
        scale = library.repeat(scale, blocks[axis] // smaller, axis=axis)
        scale = scale[tuple(slice(-(-size // smaller)) if i == axis else slice(None) for i in range(2))]
        blocks[axis] = smaller
    return dataclasses.replace(weight, scale=scale, block_shape=(blocks[0], blocks[1]))


def shard_specs(weight: Weight, axis: int, shards: int) -> Any:
    """Where a weight's arrays [..., out, in] are divided if one of the last two axes is.

    Args:
      weight: The weight, or a stack of weights.
      axis: -2 for the outputs, -1 for the features.
      shards: Into how many parts.

    Returns:
      A PartitionSpec for each of its arrays; None if a part would not be a weight itself, or no kernel knows its type.
    """
    stack = jax.eval_shape(_as_stack, weight)
    if stack is None or not _is_divisible(stack, axis, shards):
        return None
    quantizes_input = isinstance(weight, QuantizedWeight | CodedWeight) and weight.act_qtype is not None
    # Inputs are quantized in groups of features, which have to be whole.
    if quantizes_input and axis == -1 and stack.shape[2] % (shards * ACTIVATION_GROUP):
        return None

    def spec(array: jax.Array | np.ndarray) -> PartitionSpec:
        # An axis of 1 is one scale for all.
        divided = array.ndim + axis if array.shape[axis] > 1 else None
        return PartitionSpec(*(MODEL_AXIS if i == divided else None for i in range(array.ndim)))

    return jax.tree.map(spec, weight)


def _as_stack(weight: Weight) -> StoredStack | None:
    if len(weight.shape) > 2:
        return stored_stack(weight)
    return stored_stack(jax.tree.map(lambda array: array[None], weight))


def _is_divisible(stack: StoredStack, axis: int, shards: int) -> bool:
    """Whether shards of equal size hold whole blocks and bytes."""
    if stack.elements.shape[axis] % shards:
        return False
    if stack.scale is None or stack.scale.shape[axis] == 1:
        return True
    return stack.shape[axis] % (stack.block_shape[axis] * shards) == 0
