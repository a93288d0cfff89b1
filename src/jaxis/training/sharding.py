"""Weights, optimizer state and batch rows divided over devices (fully sharded data parallelism, arXiv:1910.02054).

Devices form a mesh of data ranks. A rank computes its rows of a micro-batch and holds a shard of every array, cut along
one axis. A layer gathers the other shards when it runs and again for its derivatives; its gradient is summed back into
shards. The devices of a rank share each layer, as in serving: XLA divides its products among them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import jax
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import multihost_utils
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jaxis.errors import ConfigError
from jaxis.kernels.platform import target_platform
from jaxis.parallel.mesh import (
    DATA_AXIS,
    LOGICAL_AXIS_RULES,
    MESH_AXES,
    MODEL_AXIS,
    data_spec,
    logical_sharding,
    make_mesh,
    put,
)
from jaxis.training.batches import TrainingBatch
from jaxis.training.config import FSDPParams

GATHERED = "gathered"
"""Name of gathered arrays, for policies of `jax.checkpoint`."""

Specs = Any
"""Tree of `PartitionSpec`: the division of each array over the mesh."""
Function = TypeVar("Function", bound=Callable[..., Any])

_RULES = {**LOGICAL_AXIS_RULES, "embed": (DATA_AXIS,)}
_ROWS = PartitionSpec(None, DATA_AXIS)
_MOST_SCATTERED, _MOST_GATHERED = 8, 16  # TPUs in a group for which XLA does not sum whole arrays instead
WHOLE = PartitionSpec()


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DevicePart:
    """One data rank's shard of an array, which is cut along an axis."""

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
        return checkpoint_name(_gathered(value.part, value.axis), GATHERED)

    return jax.tree.map(gather, tree, is_leaf=_is_shard)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _gathered(part: jax.Array, axis: int) -> jax.Array:
    for groups in reversed(_groups(_MOST_GATHERED)):
        part = jax.lax.all_gather(part, DATA_AXIS, axis=axis, axis_index_groups=groups, tiled=True)
    return part


def _scattered(axis: int, _: None, gradient: jax.Array) -> tuple[jax.Array]:
    """Sums the gradients of whole arrays over all data ranks; returns each rank's part."""
    for groups in _groups(_MOST_SCATTERED):
        gradient = jax.lax.psum_scatter(
            gradient, DATA_AXIS, scatter_dimension=axis, axis_index_groups=groups, tiled=True
        )
    return (gradient,)


def _groups(most: int) -> list[list[list[int]] | None]:
    """Returns the groups of data ranks of each stage of an exchange; None: all together, for up to `most` TPUs."""
    size = jax.lax.axis_size(DATA_AXIS)
    return [*_stages(size)] if target_platform() == "tpu" and size > most else [None]


def _stages(size: int) -> Iterator[list[list[int]]]:
    """Yields the groups of ranks of each stage, as many at a time as a host has TPUs, if they divide the rest."""
    ranks, rest = np.arange(size).reshape(1, size), size
    while rest > 1:
        group = next(each for each in (4, 2, rest) if rest % each == 0)
        rest //= group
        ranks = ranks.reshape(-1, group, rest)
        yield ranks.swapaxes(1, 2).reshape(-1, group).tolist()


_gathered.defvjp(lambda part, axis: (_gathered(part, axis), None), _scattered)


def has_shards(tree: Any) -> bool:
    return any(isinstance(leaf, DevicePart) for leaf in jax.tree.leaves(tree, is_leaf=_is_shard))


class Devices:
    """The devices that share a training; a single device holds and computes everything.

    Attributes:
      mesh: `(data, model)` mesh of the devices, those of other processes included.
      num_devices: Number of all of them.
      num_ranks: Number of data ranks.
    """

    def __init__(self, mesh: Mesh | None = None) -> None:
        self.mesh = make_mesh() if mesh is None else mesh
        self.num_devices, self.num_ranks = self.mesh.size, self.mesh.shape[DATA_AXIS]

    def specs(self, values: Mapping[str, Any], logical: Mapping[str, tuple[str | None, ...]]) -> Specs:
        """Chooses the division of arrays over the mesh, by name; weights may have any format. See `spec_of`."""
        return {
            name: jax.tree.map(lambda leaf, name=name: spec_of(self.mesh, leaf.shape, logical.get(name)), value)
            for name, value in values.items()
        }

    def put(self, values: Any, specs: Specs) -> Any:
        if self.num_devices == 1:
            return values
        return jax.tree.map(lambda leaf, spec: put(leaf, NamedSharding(self.mesh, spec)), values, specs)

    def on_host(self, array: jax.Array | np.ndarray) -> np.ndarray:
        """Returns an array in this host's memory. All processes call it together."""
        is_here = isinstance(array, np.ndarray) or array.is_fully_addressable
        return np.asarray(array if is_here else multihost_utils.process_allgather(array, tiled=True))

    def on_one(self, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns the whole arrays on one device."""
        return values if self.num_devices == 1 else jax.device_put(values, jax.local_devices()[0])

    @functools.cached_property
    def own_ranks(self) -> list[int]:
        """The data ranks with devices of this process."""
        here = jax.process_index()
        return [rank for rank, row in enumerate(self.mesh.devices) if any(each.process_index == here for each in row)]

    def own_rows(self, num_rows: int) -> set[int]:
        """Returns which of a micro-batch's rows, or pairs of them, this process computes."""
        of_rank = num_rows // self.num_ranks
        return {rank * of_rank + i for rank in self.own_ranks for i in range(of_rank)}

    def put_batch(self, batch: TrainingBatch, num_sides: int) -> TrainingBatch:
        """Places batch rows on the data ranks; the two sides of a pair share a rank."""
        if self.num_devices == 1:
            return batch

        def arrange(array: Any) -> jax.Array:
            num_micro_batches, num_rows, *rest = np.shape(array)
            of_rank = num_rows // num_sides // self.num_ranks
            halves = np.reshape(array, (num_micro_batches, num_sides, self.num_ranks, of_rank, *rest))
            rows = np.swapaxes(halves, 1, 2).reshape(np.shape(array))
            return put(rows, NamedSharding(self.mesh, _ROWS))

        return jax.tree.map(arrange, batch)

    def sum(self, tree: Any) -> Any:
        """Sums a tree over all data ranks, within a function of `on_each`. The sum must not be differentiated."""
        return tree if self.num_devices == 1 else jax.lax.psum(tree, DATA_AXIS)

    def maximum(self, tree: Any) -> Any:
        """Takes the largest values of all data ranks, as `sum` does the sums."""
        return tree if self.num_devices == 1 else jax.lax.pmax(tree, DATA_AXIS)

    def shards(self, values: Any, specs: Specs) -> Any:
        """Wraps each shard as a `DevicePart`, within a function of `on_each`."""
        if self.num_ranks == 1:
            return values

        def shard(leaf: jax.Array, spec: PartitionSpec) -> Any:
            return DevicePart(leaf, tuple(spec).index(DATA_AXIS)) if DATA_AXIS in spec else leaf

        return jax.tree.map(shard, values, specs)

    def sum_gradient(self, gradient: Any) -> Any:
        """Sums gradients of values from `shards` over all ranks, within a function of `on_each`, as plain shards.

        Gradients of gathered arrays are summed already.
        """
        if self.num_devices == 1:
            return gradient
        return jax.tree.map(
            lambda leaf: leaf.part if isinstance(leaf, DevicePart) else jax.lax.psum(leaf, DATA_AXIS),
            gradient,
            is_leaf=_is_shard,
        )

    def on_each(self, function: Function, trained: Specs, frozen: Specs, out_specs: Any) -> Function:
        """Makes a function of (trained, frozen, batch, key) run on each data rank, with its shards and batch rows.

        Takes the division of the arguments and of the result; what is not divided must be equal on all ranks.
        """
        if self.num_devices == 1:
            return function

        def of_rank(specs: Specs) -> Specs:
            return jax.tree.map(lambda spec: data_spec(NamedSharding(self.mesh, spec)), specs)

        return jax.shard_map(
            function,
            mesh=self.mesh,
            in_specs=(of_rank(trained), of_rank(frozen), _ROWS, WHOLE),
            out_specs=of_rank(out_specs),
            # With nothing left to divide, all axes are manual: XLA cannot divide a kernel, not even by one.
            axis_names={DATA_AXIS} if self.mesh.shape[MODEL_AXIS] > 1 else set(MESH_AXES),
            check_vma=False,
        )


def devices_of(params: FSDPParams) -> Devices:
    """Returns the devices of a training. Raises ConfigError if they cannot be divided as configured."""
    if not params.enable_fsdp:
        return Devices()
    num_devices, size = jax.device_count(), params.tensor_parallel_size
    check_devices(params, num_devices)
    return Devices(make_mesh(size, jax.process_count(), data_parallel_size=num_devices // size))


def check_devices(params: FSDPParams, num_devices: int) -> None:
    """Raises ConfigError unless so many devices can be divided into groups that share a layer."""
    if num_devices % params.tensor_parallel_size:
        raise ConfigError(
            f"fsdp.tensor_parallel_size={params.tensor_parallel_size} does not divide the number of devices, "
            f"{num_devices}: give a divisor"
        )


def spec_of(
    mesh: Mesh | AbstractMesh, shape: tuple[int, ...], logical: tuple[str | None, ...] | None = None
) -> PartitionSpec:
    """Returns the division of an array over a mesh.

    The rules of `parallel.mesh` apply to an array with logical axes, with embedding axes over the data ranks. Ranks
    divide an array without such axes along its longest axis that divides equally.
    """
    has_rules = logical is not None and len(logical) == len(shape)
    entries = [*logical_sharding(mesh, logical if has_rules else None, shape, _RULES).spec]
    if DATA_AXIS not in entries:
        free = [i for i, size in enumerate(shape) if not entries[i] and size and size % mesh.shape[DATA_AXIS] == 0]
        if free:
            entries[max(free, key=shape.__getitem__)] = DATA_AXIS
    return PartitionSpec(*entries)


@dataclass(frozen=True)
class Placement:
    """Devices that share a training's arrays, and the division of its trained and frozen arrays."""

    devices: Devices
    trained: Specs
    frozen: Specs
