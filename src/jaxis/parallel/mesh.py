"""How many devices can have a layer's experts, whole ones and as many on each."""

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
"""The logical axis of experts that lie whole on devices; of those of which every device has a part, it is "expert"."""
EXPERT_AXES = ("expert", SPREAD_EXPERT)

# Logical axis of a parameter or cache -> mesh axes over whose product it is split. Axes not named here are replicated.
LOGICAL_AXIS_RULES: dict[str, tuple[str, ...]] = {
    "heads": (MODEL_AXIS,),
    "kv_heads": (MODEL_AXIS,),
    "mlp": (MODEL_AXIS,),
    "vocab": (MODEL_AXIS,),
    "context": (MODEL_AXIS,),
    SPREAD_EXPERT: (DATA_AXIS, MODEL_AXIS),
    # Of a KV cache, and slots of a state cache: each data rank has its own.
    "blocks": (DATA_AXIS,),
}

PADDED_ROWS = frozenset({"vocab"})
"""Logical axes of a matrix's rows that get rows of zeros at their end, so that devices can have equally many."""


def make_mesh(tensor_parallel_size: int = 1, num_hosts: int = 1, *, data_parallel_size: int = 1) -> Mesh:
    """A `(data, model)` mesh over the first devices of this host, or of each of several.

    The devices of a data rank are neighbours, on one host where they can be.

    Args:
      tensor_parallel_size: Devices that share each layer.
      num_hosts: Hosts whose JAX processes have met; they divide the number of devices.
      data_parallel_size: Data ranks.

    Raises:
      ConfigError: There are fewer devices.
    """
    [mesh] = make_stage_meshes(1, tensor_parallel_size, num_hosts, data_parallel_size=data_parallel_size)
    return mesh


def make_stage_meshes(
    num_stages: int, tensor_parallel_size: int = 1, num_hosts: int = 1, *, data_parallel_size: int = 1
) -> list[Mesh]:
    """A `(data, model)` mesh for each pipeline stage.

    The devices of a stage are neighbours, and so are those of stages that follow each other: with as many hosts as
    stages, each host has one, and its devices exchange nothing with others but what stages hand on.

    Args:
      num_stages: Meshes.
      tensor_parallel_size: Devices of a data rank of each.
      num_hosts: See `make_mesh`.
      data_parallel_size: Data ranks.

    Raises:
      ConfigError: There are fewer devices.
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
    """Places a value, which every process of the mesh has, on the devices.

    `jax.device_put` would have processes compare their values first, which takes an exchange for each.
    """
    if sharding.is_fully_addressable or not (isinstance(value, np.ndarray) or value.is_fully_addressable):
        return jax.device_put(value, sharding)
    host = np.asarray(value)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


def devices_of_layer() -> int:
    """How many devices of the current mesh share each layer; 1 without a mesh."""
    mesh = jax.sharding.get_abstract_mesh()
    return 1 if mesh.empty else mesh.shape[MODEL_AXIS]


def automatic_axes() -> frozenset[str]:
    """The axes of the current mesh that XLA divides: inside of `jax.shard_map`, those that it was not given."""
    mesh = jax.sharding.get_abstract_mesh()
    return frozenset(name for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind == AxisType.Auto)


def on_each_device(function: Function, in_specs: Any, out_specs: Any) -> Function:
    """`jax.shard_map` of a function over all axes that the code around it does not run it on already.

    So the function gets each device's own part, whether the model's step is one program of the whole mesh, or runs in a
    region that is manual over the data axis. In there, specs name the model axis alone, and all parts are of this
    region's own rank; sums and gathers may name both.
    """
    if not (axes := automatic_axes()):
        return function
    return jax.shard_map(function, in_specs=in_specs, out_specs=out_specs, axis_names=axes, check_vma=False)


def logical_sharding(
    mesh: Mesh | AbstractMesh,
    axes: tuple[str | None, ...] | None,
    shape: tuple[int, ...],
    rules: Mapping[str, tuple[str, ...]] = LOGICAL_AXIS_RULES,
) -> NamedSharding:
    """The sharding of a tensor with these logical axes.

    Mesh axes divide one axis of a tensor, the first that names them. An axis whose size the product of its mesh axes
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
    """The shape in which devices hold a parameter of this shape: with more rows, if its axis is of `PADDED_ROWS`.

    A vector, such as the bias of a head, is small, and stays as it is.
    """
    if mesh.empty or len(shape) != 2 or axes[0] not in PADDED_ROWS:
        return shape
    num_parts = _product(mesh, LOGICAL_AXIS_RULES[axes[0]])
    return -(-shape[0] // num_parts) * num_parts, shape[1]


def data_spec(sharding: NamedSharding) -> PartitionSpec:
    """What of a sharding a region must be told of that is manual over the data axis alone."""
    return PartitionSpec(*(DATA_AXIS if DATA_AXIS in _names(entry) else None for entry in sharding.spec))


def _choices(names: list[str]) -> Iterator[tuple[str, ...]]:
    """All of them, then each, the last first: neighbouring devices are along the last axis."""
    if len(names) > 1:
        yield tuple(names)
    yield from ((name,) for name in reversed(names))


def _product(mesh: Mesh | AbstractMesh, names: Sequence[str]) -> int:
    return math.prod(mesh.shape[name] for name in names)


def _names(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return entry if isinstance(entry, tuple) else (entry,) if entry else ()


# How many devices can share a layer's attention heads.


def check_heads(num_heads: int | None, num_kv_heads: int, tensor_parallel_size: int) -> None:
    """Checks that devices can share attention heads equally.

    Args:
      num_heads: H; None if any number of query heads will do.
      num_kv_heads: K. With fewer than devices, each device has a copy of one.
      tensor_parallel_size: Devices that share each layer.

    Raises:
      ConfigError: They cannot.
    """
    if _can_share(num_heads, num_kv_heads, tensor_parallel_size):
        return
    sizes = [size for size in range(1, tensor_parallel_size) if _can_share(num_heads, num_kv_heads, size)]
    choice = " or ".join(filter(None, (", ".join(map(str, sizes[:-1])), *map(str, sizes[-1:]))))
    advice = f"give {choice}"
    if num_heads is not None and num_heads % tensor_parallel_size:
        raise ConfigError(
            f"tensor_parallel_size={tensor_parallel_size} does not divide the model's {num_heads} attention heads: "
            f"{advice}"
        )
    raise ConfigError(
        f"tensor_parallel_size={tensor_parallel_size} and the model's {num_kv_heads} key-value heads: one must divide "
        f"the other: {advice}"
    )


def _can_share(num_heads: int | None, num_kv_heads: int, num_devices: int) -> bool:
    divides_queries = num_heads is None or num_heads % num_devices == 0
    return divides_queries and (num_kv_heads % num_devices == 0 or num_devices % num_kv_heads == 0)


# How many devices can have a layer's experts, whole ones and as many on each.


def check_experts(num_experts: int, num_devices: int) -> None:
    """Checks that devices can have equally many experts.

    Args:
      num_experts: X of a layer.
      num_devices: All that run the model.

    Raises:
      ConfigError: They cannot.
    """
    if num_experts % num_devices == 0:
        return
    sizes = [size for size in range(1, num_devices) if num_experts % size == 0]
    choice = " or ".join(filter(None, (", ".join(map(str, sizes[:-1])), str(sizes[-1]))))
    raise ConfigError(
        f"enable_expert_parallel: {num_devices} devices cannot have equally many of a layer's {num_experts} experts: "
        f"give {choice}, or leave it out, so that every device has a part of each expert"
    )
