"""Meshes of devices, and the division of arrays over their axes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from jaxis.errors import ConfigError

DATA_AXIS, MODEL_AXIS = MESH_AXES = ("data", "model")

Function = TypeVar("Function", bound=Callable[..., Any])

SPREAD_EXPERT = "spread_expert"
"""Logical axis of experts that lie whole on devices; experts of which every device has a part have "expert"."""
EXPERT_AXES = ("expert", SPREAD_EXPERT)

# Logical axis of a parameter or cache -> mesh axes over whose product it is split. Axes not named here are replicated.
LOGICAL_AXIS_RULES: dict[str, tuple[str, ...]] = {
    "heads": (MODEL_AXIS,),
    "kv_heads": (MODEL_AXIS,),
    "mlp": (MODEL_AXIS,),
    "vocab": (MODEL_AXIS,),
    "context": (MODEL_AXIS,),
    SPREAD_EXPERT: (DATA_AXIS, MODEL_AXIS),
    # Blocks of a KV cache and slots of a state cache: each data rank has its own.
    "blocks": (DATA_AXIS,),
}

PADDED_ROWS = frozenset({"vocab"})
"""Logical axes of a matrix's rows that get rows of zeros at their end, so that devices can have equally many."""


def make_mesh(tensor_parallel_size: int = 1, num_hosts: int = 1, *, data_parallel_size: int = 1) -> Mesh:
    """Returns a `(data, model)` mesh over the first devices of this host, or of each of several.

    The devices of a data rank are neighbours, on one host if possible. `tensor_parallel_size` devices share each layer.
    The hosts, whose JAX processes have met, divide the number of devices. Raises ConfigError if there are fewer
    devices.
    """
    [mesh] = make_stage_meshes(1, tensor_parallel_size, num_hosts, data_parallel_size=data_parallel_size)
    return mesh


def make_stage_meshes(
    num_stages: int, tensor_parallel_size: int = 1, num_hosts: int = 1, *, data_parallel_size: int = 1
) -> list[Mesh]:
    """Returns a `(data, model)` mesh for each pipeline stage; the other arguments are those of `make_mesh`.

    The devices of a stage are neighbours, and so are consecutive stages. With as many hosts as stages, each host has
    one stage, and hosts exchange only what stages hand on. Raises ConfigError if there are fewer devices, or hosts have
    different ones.
    """
    if num_hosts == 1:
        by_host = [jax.local_devices()]
    else:
        by_host = [[d for d in jax.devices() if d.process_index == rank] for rank in range(num_hosts)]
    sizes = {"pipeline": num_stages, "data": data_parallel_size, "tensor": tensor_parallel_size}
    per_host = math.prod(sizes.values()) // num_hosts
    for rank, devices in enumerate(by_host):
        if not 1 <= per_host <= len(devices):
            where = f" on each of {num_hosts} hosts; host {rank} has {len(devices)}" if num_hosts > 1 else ""
            given = [f"{name}_parallel_size={n}" for name, n in sizes.items() if n > 1 or name == "tensor"]
            raise ConfigError(
                f"{' with '.join(given)} needs {per_host if where or len(given) > 1 else 'that many'} "
                f"{jax.local_devices()[0].platform} devices{where or f'; {len(devices)} found'}"
            )
    kinds = {device.device_kind for devices in by_host for device in devices[:per_host]}
    if len(kinds) > 1:
        raise ConfigError(f"the hosts have different devices: {', '.join(sorted(kinds))}")
    chosen = np.asarray([devices[:per_host] for devices in by_host])
    grids = chosen.reshape(num_stages, data_parallel_size, tensor_parallel_size)
    return [Mesh(grid, MESH_AXES, axis_types=(AxisType.Auto,) * 2) for grid in grids]


def put(value: np.ndarray | jax.Array, sharding: NamedSharding) -> jax.Array:
    """Places a value that every process of the mesh has: `jax.device_put` would have processes compare values first."""
    if sharding.is_fully_addressable or not (isinstance(value, np.ndarray) or value.is_fully_addressable):
        return jax.device_put(value, sharding)
    host = np.asarray(value)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


def devices_of_layer() -> int:
    """Returns the number of devices of the current mesh that share each layer; 1 without a mesh."""
    mesh = jax.sharding.get_abstract_mesh()
    return 1 if mesh.empty else mesh.shape[MODEL_AXIS]


def automatic_axes() -> frozenset[str]:
    """Returns the axes of the current mesh that XLA divides; inside `jax.shard_map`, those that are not manual."""
    mesh = jax.sharding.get_abstract_mesh()
    return frozenset(name for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind == AxisType.Auto)


def on_each_device(function: Function, in_specs: Any, out_specs: Any) -> Function:
    """Returns `jax.shard_map` of a function over all axes that are not manual yet.

    The function thus gets each device's own part, whether the model's step is one program of the whole mesh, or runs in
    a region that is manual over the data axis. In such a region, specs name the model axis alone, and all parts belong
    to the region's own rank; sums and gathers may name both.
    """
    if not (axes := automatic_axes()):
        return function
    return jax.shard_map(function, in_specs=in_specs, out_specs=out_specs, axis_names=axes, check_vma=False)


def alike_on_each_device(function: Function) -> Function:
    """Returns a function that each device that shares a layer runs on whole operands, all with the same results."""
    return function if devices_of_layer() == 1 else on_each_device(function, PartitionSpec(), PartitionSpec())


def logical_sharding(
    mesh: Mesh | AbstractMesh,
    axes: tuple[str | None, ...] | None,
    shape: tuple[int, ...],
    rules: Mapping[str, tuple[str, ...]] = LOGICAL_AXIS_RULES,
) -> NamedSharding:
    """Returns the sharding of a tensor with these logical axes.

    A mesh axis divides only the first axis of a tensor that names it. An axis whose size the product of its mesh axes
    does not divide is split over fewer, or replicated; tables and heads are padded first (`padded_shape`).
    """
    if axes is None:
        axes = (None,) * len(shape)
    spec: list[str | tuple[str, ...] | None] = []
    used: set[str] = set()
    for axis, size in zip(axes, shape, strict=True):
        mesh_axes = [name for name in rules.get(axis or "", ()) if name not in used]
        chosen = next((names for names in _choices(mesh_axes) if size % _product(mesh, names) == 0), ())
        used.update(chosen)
        spec.append(chosen if len(chosen) > 1 else next(iter(chosen), None))
    return NamedSharding(mesh, PartitionSpec(*spec))


def padded_shape(mesh: Mesh | AbstractMesh, axes: tuple[str | None, ...], shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the shape in which devices hold a parameter of this shape: with more rows for axes in `PADDED_ROWS`.

    A vector, such as the bias of a head, is small, and stays as it is.
    """
    if mesh.empty or len(shape) != 2 or axes[0] not in PADDED_ROWS:
        return shape
    num_parts = _product(mesh, LOGICAL_AXIS_RULES[axes[0]])
    return -(-shape[0] // num_parts) * num_parts, shape[1]


def data_spec(sharding: NamedSharding) -> PartitionSpec:
    """Returns the part of a sharding that a region needs that is manual over the data axis alone."""
    return PartitionSpec(*(DATA_AXIS if DATA_AXIS in _names(entry) else None for entry in sharding.spec))


def _choices(names: list[str]) -> Iterator[tuple[str, ...]]:
    """Yields all names, then each, the last first: neighbouring devices are along the last axis."""
    if len(names) > 1:
        yield tuple(names)
    yield from ((name,) for name in reversed(names))


def _product(mesh: Mesh | AbstractMesh, names: Sequence[str]) -> int:
    return math.prod(mesh.shape[name] for name in names)


def _names(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return entry if isinstance(entry, tuple) else (entry,) if entry else ()
