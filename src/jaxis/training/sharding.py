"""Weights, moments and rows divided over devices (fully sharded data parallelism, arXiv:1910.02054).

Each device computes the rows of its part of a micro-batch. Of every array it holds a part along one axis; a layer
gathers those of the others when it runs, also for its derivatives, and its gradient is summed to the parts again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import jax
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jaxis.parallel.mesh import DATA_AXIS, LOGICAL_AXIS_RULES, logical_sharding, make_mesh, put
from jaxis.training.batches import TrainingBatch

GATHERED = "gathered"
"""The name, for policies of `jax.checkpoint`, of arrays that were gathered."""

Axes = Any
"""A tree of integers like one of arrays: the axis that is divided over devices, or -1."""
Function = TypeVar("Function", bound=Callable[..., Any])

_RULES = {**LOGICAL_AXIS_RULES, "embed": (DATA_AXIS,)}
_ROWS = PartitionSpec(None, DATA_AXIS)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DevicePart:
    """A device's part of an array.

    Attributes:
      part: The part.
      axis: On which the parts follow each other.
    """

    part: jax.Array
    axis: int = field(metadata={"static": True})

    @property
    def dtype(self) -> Any:
        """Of the array."""
        return self.part.dtype

    def astype(self, dtype: Any) -> DevicePart:
        """The part in another type."""
        return DevicePart(self.part.astype(dtype), self.axis)


def _is_shard(value: Any) -> bool:
    return isinstance(value, DevicePart)


def whole(tree: Any) -> Any:
    """The tree with the parts of all devices put together."""

    def gather(value: Any) -> Any:
        if not isinstance(value, DevicePart):
            return value
        return checkpoint_name(jax.lax.all_gather(value.part, DATA_AXIS, axis=value.axis, tiled=True), GATHERED)

    return jax.tree.map(gather, tree, is_leaf=_is_shard)


def has_shards(tree: Any) -> bool:
    """Whether some of the tree is on other devices."""
    return any(isinstance(leaf, DevicePart) for leaf in jax.tree.leaves(tree, is_leaf=_is_shard))


class Devices:
    """The devices that share a training; one of them holds and computes everything.

    Args:
      num_devices: How many there are.

    Raises:
      ConfigError: There are fewer.
    """

    def __init__(self, num_devices: int = 1) -> None:
        self.num_devices = num_devices
        self.mesh: Mesh = make_mesh(data_parallel_size=num_devices)

    def axes(self, values: Mapping[str, Any], logical: Mapping[str, tuple[str | None, ...]]) -> Axes:
        """The axis of each array that devices share.

        That which `parallel.mesh` has rules for, with those of embeddings over the devices; of arrays that have none,
        the longest that the devices can share equally.

        Args:
          values: Arrays, or other forms of weights, by name.
          logical: The logical axes of those that have them.
        """
        return {
            name: jax.tree.map(lambda leaf, name=name: shared_axis(self.mesh, leaf.shape, logical.get(name)), value)
            for name, value in values.items()
        }

    def put(self, values: Any, axes: Axes) -> Any:
        """Places arrays on the devices."""
        if self.num_devices == 1:
            return values
        return jax.tree.map(lambda leaf, axis: put(leaf, self.sharding(axis)), values, axes)

    def on_one(self, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """The whole arrays on one device."""
        return values if self.num_devices == 1 else jax.device_put(values, jax.local_devices()[0])

    def sharding(self, axis: int) -> NamedSharding:
        """Of an array that is divided along this axis."""
        return NamedSharding(self.mesh, _spec(axis))

    def put_batch(self, batch: TrainingBatch, rows_per_item: int) -> TrainingBatch:
        """Places a batch's rows on the devices: those of an item on the same one."""
        if self.num_devices == 1:
            return batch

        def arrange(array: Any) -> jax.Array:
            num_micro_batches, num_rows, *rest = np.shape(array)
            items = num_rows // rows_per_item // self.num_devices
            halves = np.reshape(array, (num_micro_batches, rows_per_item, self.num_devices, items, *rest))
            rows = np.swapaxes(halves, 1, 2).reshape(np.shape(array))
            return put(rows, NamedSharding(self.mesh, _ROWS))

        return jax.tree.map(arrange, batch)

    def sum(self, tree: Any) -> Any:
        """In a function of `on_each`: the sums over all devices; not to be differentiated."""
        return tree if self.num_devices == 1 else jax.lax.psum(tree, DATA_AXIS)

    def shards(self, values: Any, axes: Axes) -> Any:
        """In a function of `on_each`: the values, with each part as a `DevicePart`."""
        if self.num_devices == 1:
            return values
        return jax.tree.map(lambda leaf, axis: leaf if axis < 0 else DevicePart(leaf, axis), values, axes)

    def sum_gradient(self, gradient: Any) -> Any:
        """In a function of `on_each`: the gradient over all devices' rows of what `shards` made, as plain parts.

        Of what was gathered, it is summed already.
        """
        if self.num_devices == 1:
            return gradient
        return jax.tree.map(
            lambda leaf: leaf.part if isinstance(leaf, DevicePart) else jax.lax.psum(leaf, DATA_AXIS),
            gradient,
            is_leaf=_is_shard,
        )

    def on_each(self, function: Function, trained: Axes, frozen: Axes, out_axes: Any) -> Function:
        """A function of (trained, frozen, batch, key) that each device runs on its parts and rows.

        Args:
          function: What is run.
          trained: The axes of its first argument.
          frozen: Those of the second.
          out_axes: Those of what it returns; what has -1 must be the same on all devices.
        """
        if self.num_devices == 1:
            return function
        specs = jax.tree.map(_spec, (trained, frozen))
        return jax.shard_map(
            function,
            mesh=self.mesh,
            in_specs=(*specs, _ROWS, PartitionSpec()),
            out_specs=jax.tree.map(_spec, out_axes),
            check_vma=False,
        )


def shared_axis(
    mesh: Mesh | AbstractMesh, shape: tuple[int, ...], logical: tuple[str | None, ...] | None = None
) -> int:
    """The axis of an array that devices share; -1 if they cannot. See `Devices.axes`.

    Args:
      mesh: The devices.
      shape: Of the array.
      logical: Its logical axes; None if it has none.
    """
    if logical is not None and len(logical) == len(shape):
        spec = logical_sharding(mesh, logical, shape, _RULES).spec
        named = [i for i, entry in enumerate(spec) if entry == DATA_AXIS or DATA_AXIS in (entry or ())]
        if named:
            return named[0]
    shared = [i for i, size in enumerate(shape) if size and size % mesh.shape[DATA_AXIS] == 0]
    return max(shared, key=shape.__getitem__, default=-1)


@dataclass(frozen=True)
class Placement:
    """Where the arrays of a training are.

    Attributes:
      devices: That share them.
      trained: The axes of what is trained.
      frozen: Those of what is not.
    """

    devices: Devices
    trained: Axes
    frozen: Axes


def _spec(axis: int) -> PartitionSpec:
    return PartitionSpec(*[None] * axis, DATA_AXIS) if axis >= 0 else PartitionSpec()
