"""Weights, optimizer state and batch rows divided over devices (fully sharded data parallelism, arXiv:1910.02054).

Each device computes its rows of a micro-batch and holds a shard of every array, cut along one axis. A layer gathers the
other shards when it runs and again for its derivatives; its gradient is summed back into shards.
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
"""Name of gathered arrays, for policies of `jax.checkpoint`."""

Axes = Any
"""Tree of integers: the axis along which each array is divided over devices, or -1."""
Function = TypeVar("Function", bound=Callable[..., Any])

_RULES = {**LOGICAL_AXIS_RULES, "embed": (DATA_AXIS,)}
_ROWS = PartitionSpec(None, DATA_AXIS)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DevicePart:
    """One device's shard of an array, which is cut along an axis."""

    part: jax.Array
    axis: int = field(metadata={"static": True})

    @property
    def dtype(self) -> Any:
        return self.part.dtype

    def astype(self, dtype: Any) -> DevicePart:
        return DevicePart(self.part.astype(dtype), self.axis)


def _is_shard(value: Any) -> bool:
    return isinstance(value, DevicePart)


def whole(tree: Any) -> Any:
    def gather(value: Any) -> Any:
        if not isinstance(value, DevicePart):
            return value
        return checkpoint_name(jax.lax.all_gather(value.part, DATA_AXIS, axis=value.axis, tiled=True), GATHERED)

    return jax.tree.map(gather, tree, is_leaf=_is_shard)


def has_shards(tree: Any) -> bool:
    return any(isinstance(leaf, DevicePart) for leaf in jax.tree.leaves(tree, is_leaf=_is_shard))


class Devices:
    """The devices that share a training; a single device holds and computes everything.

    Raises ConfigError if the machine has fewer devices.
    """

    def __init__(self, num_devices: int = 1) -> None:
        self.num_devices = num_devices
        self.mesh: Mesh = make_mesh(data_parallel_size=num_devices)

    def axes(self, values: Mapping[str, Any], logical: Mapping[str, tuple[str | None, ...]]) -> Axes:
        """Chooses the axis of each array that is divided over devices, by name; weights may have any format.

        The rules of `parallel.mesh` apply to arrays with logical axes, with embedding axes over the devices. An array
        without rules is divided along its longest axis that divides equally.
        """
        return {
            name: jax.tree.map(lambda leaf, name=name: shared_axis(self.mesh, leaf.shape, logical.get(name)), value)
            for name, value in values.items()
        }

    def put(self, values: Any, axes: Axes) -> Any:
        if self.num_devices == 1:
            return values
        return jax.tree.map(lambda leaf, axis: put(leaf, self.sharding(axis)), values, axes)

    def on_one(self, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns the whole arrays on one device."""
        return values if self.num_devices == 1 else jax.device_put(values, jax.local_devices()[0])

    def sharding(self, axis: int) -> NamedSharding:
        return NamedSharding(self.mesh, _spec(axis))

    def put_batch(self, batch: TrainingBatch, num_sides: int) -> TrainingBatch:
        """Places batch rows on the devices; the two sides of a pair share a device."""
        if self.num_devices == 1:
            return batch

        def arrange(array: Any) -> jax.Array:
            num_micro_batches, num_rows, *rest = np.shape(array)
            of_device = num_rows // num_sides // self.num_devices
            halves = np.reshape(array, (num_micro_batches, num_sides, self.num_devices, of_device, *rest))
            rows = np.swapaxes(halves, 1, 2).reshape(np.shape(array))
            return put(rows, NamedSharding(self.mesh, _ROWS))

        return jax.tree.map(arrange, batch)

    def sum(self, tree: Any) -> Any:
        """Sums a tree over all devices, within a function of `on_each`. The sum must not be differentiated."""
        return tree if self.num_devices == 1 else jax.lax.psum(tree, DATA_AXIS)

    def maximum(self, tree: Any) -> Any:
        """Takes the largest values of all devices, as `sum` does the sums."""
        return tree if self.num_devices == 1 else jax.lax.pmax(tree, DATA_AXIS)

    def shards(self, values: Any, axes: Axes) -> Any:
        """Wraps each shard as a `DevicePart`, within a function of `on_each`."""
        if self.num_devices == 1:
            return values
        return jax.tree.map(lambda leaf, axis: leaf if axis < 0 else DevicePart(leaf, axis), values, axes)

    def sum_gradient(self, gradient: Any) -> Any:
        """Sums gradients of values from `shards` over all devices, within a function of `on_each`, as plain shards.

        Gradients of gathered arrays are summed already.
        """
        if self.num_devices == 1:
            return gradient
        return jax.tree.map(
            lambda leaf: leaf.part if isinstance(leaf, DevicePart) else jax.lax.psum(leaf, DATA_AXIS),
            gradient,
            is_leaf=_is_shard,
        )

    def on_each(self, function: Function, trained: Axes, frozen: Axes, out_axes: Any) -> Function:
        """Makes a function of (trained, frozen, batch, key) run on each device, with its shards and batch rows.

        Takes the divided axes of the arguments and of the result, where a value with -1 must be equal on all devices.
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
    """Returns the axis of an array that is divided over devices; -1 if it cannot be. See `Devices.axes`."""
    if logical is not None and len(logical) == len(shape):
        spec = logical_sharding(mesh, logical, shape, _RULES).spec
        named = [i for i, entry in enumerate(spec) if entry == DATA_AXIS or DATA_AXIS in (entry or ())]
        if named:
            return named[0]
    shared = [i for i, size in enumerate(shape) if size and size % mesh.shape[DATA_AXIS] == 0]
    return max(shared, key=shape.__getitem__, default=-1)


@dataclass(frozen=True)
class Placement:
    """Devices that share a training's arrays, and the divided axes of its trained and frozen arrays."""

    devices: Devices
    trained: Axes
    frozen: Axes


def _spec(axis: int) -> PartitionSpec:
    return PartitionSpec(*[None] * axis, DATA_AXIS) if axis >= 0 else PartitionSpec()
