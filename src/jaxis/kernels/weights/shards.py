"""Division of a weight between the devices of the current mesh, and lookups of rows on each device's own part."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from jaxis.kernels.grouped_matmul.stored import StoredStack
from jaxis.kernels.native_constants import ACTIVATION_GROUP
from jaxis.kernels.weights.float_weight import as_value, as_weight
from jaxis.kernels.weights.weight import WeightValue
from jaxis.parallel.mesh import (
    LOGICAL_AXIS_RULES,
    MODEL_AXIS,
    automatic_axes,
    devices_of_layer,
    on_each_device,
    padded_shape,
)

Axes = tuple[str | None, ...]


def num_shards() -> int | None:
    """Returns the number of devices that share the current mesh's features; None for one, or inside `shard_map`."""
    if MODEL_AXIS not in automatic_axes() or devices_of_layer() == 1:
        return None
    return devices_of_layer()


def is_divided(axis: str | None) -> bool:
    """Returns whether devices have parts of this logical axis."""
    return axis is not None and MODEL_AXIS in LOGICAL_AXIS_RULES.get(axis, ())


def divided_axis(weight: WeightValue, axes: Axes) -> int | None:
    """Returns the axis of a weight [..., out, in] that the current mesh divides, so that each part is a weight itself.

    It is -2 or -1, by the weight's logical axes, but -2 in place of -1 if that would cut groups of columns that share a
    scale. None if the weight cannot be divided, or if `axes` divide both or none.
    """
    shards = num_shards()
    divided = [axis for axis in (-2, -1) if is_divided(axes[axis])]
    if shards is None or len(divided) != 1:
        return None
    return next((axis for axis in {divided[0]: None, -2: None} if shard_specs(weight, axis, shards) is not None), None)


def placement(weight: WeightValue, axes: Axes) -> Axes:
    """Returns the logical axes by which `divided_axis` requires a weight's arrays to be placed on the current mesh."""
    stack = stack_struct(weight)
    is_float = stack is None or stack.scale is None
    axis = None if is_float else divided_axis(weight, axes)
    if axis is None or is_divided(axes[axis]):
        return axes
    return (*axes[:-2], axes[-1], axes[-2])


def in_equal_parts(weight: WeightValue, axes: Axes) -> WeightValue:
    """Returns the weight [out, in], or a bias [out], in a form that the current mesh divides by its logical axes.

    Rows of zeros are added (`padded_shape`), and blocks of rows and columns become smaller where the mesh cuts them.
    """
    shards = num_shards()
    if shards is None:
        return weight
    whole = as_weight(weight)
    if len(whole.shape) == 1:
        return weight
    num_rows, _ = padded_shape(jax.sharding.get_abstract_mesh(), axes[-2:], whole.shape)
    if num_rows != whole.shape[0]:
        whole = whole.with_rows(num_rows)
    rows, columns = (shards if is_divided(axis) else 1 for axis in axes[-2:])
    return as_value(whole.with_whole_blocks((rows, columns)))


def shard_specs(weight: WeightValue, axis: int, shards: int) -> Any:
    """Returns PartitionSpecs of a weight's arrays [..., out, in], divided along axis -2 (outputs) or -1 (features).

    None if a part would not be a weight itself, or no kernel knows the weight's form.
    """
    stack = stack_struct(weight)
    if stack is None or not _is_divisible(stack, axis, shards):
        return None
    # Inputs are quantized in groups of features, which have to be whole.
    if as_weight(weight).quantizes_input and axis == -1 and stack.shape[2] % (shards * ACTIVATION_GROUP):
        return None

    def spec(array: jax.Array | np.ndarray) -> PartitionSpec:
        # An axis of 1 is one scale for all.
        divided = array.ndim + axis if array.shape[axis] > 1 else None
        return PartitionSpec(*(MODEL_AXIS if i == divided else None for i in range(array.ndim)))

    return jax.tree.map(spec, weight)


def stack_struct(weight: WeightValue) -> StoredStack | None:
    """Returns `Weight.kernel_stack` as shapes and types for a stack [X, out, in], or for a weight as a stack of one."""
    leading = () if len(as_weight(weight).shape) > 2 else (1,)
    structs = jax.tree.map(lambda array: jax.ShapeDtypeStruct((*leading, *array.shape), array.dtype), weight)
    return as_weight(structs).kernel_stack()


def lookup_on_shards(ids: jax.Array, weight: WeightValue, dtype: DTypeLike, axis: str | None) -> jax.Array | None:
    """Looks up rows [T, in] of a weight [out, in] with divided rows (`axis`); None if the mesh does not divide them.

    Each device looks up the rows that it has, and one sum over the devices follows; XLA may gather the whole table
    instead. The result is bit-identical to one device's. Ids i32 [T] out of range are clipped.
    """
    shards = num_shards()
    if shards is None or not is_divided(axis):
        return None
    if (specs := shard_specs(weight, -2, shards)) is None:
        return None
    num_rows = as_weight(weight).shape[0]
    rows_per_shard = num_rows // shards

    def on_shard(ids: jax.Array, of_shard: Any) -> jax.Array:
        row = ids - jax.lax.axis_index(MODEL_AXIS) * rows_per_shard
        rows = as_weight(of_shard).lookup(row, dtype)
        is_here = (row >= 0) & (row < rows_per_shard)
        # One device adds a row to the others' zeros, so the sum is exact in any order.
        return jax.lax.psum(jnp.where(is_here[:, None], rows, 0), MODEL_AXIS)

    everywhere = PartitionSpec()
    ids = jnp.clip(ids, 0, num_rows - 1)
    return on_each_device(on_shard, (everywhere, specs), everywhere)(ids, weight)


def _is_divisible(stack: StoredStack, axis: int, shards: int) -> bool:
    if stack.elements.shape[axis] % shards:
        return False
    if stack.scale is None or stack.scale.shape[axis] == 1:
        return True
    return stack.shape[axis] % (stack.block_shape[axis] * shards) == 0
