"""The device mesh, and the one table that maps a tensor's logical axes to mesh axes."""

from __future__ import annotations

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from jaxis.errors import ConfigError

DATA_AXIS, MODEL_AXIS = MESH_AXES = ("data", "model")

# Logical axis of a parameter or cache -> mesh axis that it is split over. An axis not named here is replicated.
LOGICAL_AXIS_RULES: dict[str, str] = {
    "heads": MODEL_AXIS,
    "kv_heads": MODEL_AXIS,
    "mlp": MODEL_AXIS,
    "vocab": MODEL_AXIS,
}


def make_mesh(tensor_parallel_size: int = 1, num_hosts: int = 1) -> Mesh:
    """A `(data, model)` mesh over the first devices of this host, or of each of several.

    Args:
      tensor_parallel_size: Devices in all; a multiple of `num_hosts`.
      num_hosts: Hosts whose JAX processes have met.

    Raises:
      ConfigError: There are fewer devices.
    """
    if num_hosts == 1:
        by_host = [jax.local_devices()]
    else:
        by_host = [[d for d in jax.devices() if d.process_index == rank] for rank in range(num_hosts)]
    per_host = tensor_parallel_size // num_hosts
    for rank, devices in enumerate(by_host):
        if not 1 <= per_host <= len(devices):
            where = f" on each of {num_hosts} hosts; host {rank} has {len(devices)}" if num_hosts > 1 else ""
            raise ConfigError(
                f"tensor_parallel_size={tensor_parallel_size} needs {per_host if where else 'that many'} "
                f"{jax.local_devices()[0].platform} devices{where or f'; {len(devices)} found'}"
            )
    kinds = {device.device_kind for devices in by_host for device in devices[:per_host]}
    if len(kinds) > 1:
        raise ConfigError(f"the hosts have different devices: {', '.join(sorted(kinds))}")
    grid = np.asarray([devices[:per_host] for devices in by_host]).reshape(1, tensor_parallel_size)
    return Mesh(grid, MESH_AXES, axis_types=(AxisType.Auto,) * 2)


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


def logical_sharding(
    mesh: Mesh | AbstractMesh, axes: tuple[str | None, ...] | None, shape: tuple[int, ...]
) -> NamedSharding:
    """The sharding of a tensor with these logical axes.

    An axis whose size is not divisible by the mesh axis is replicated (a vocabulary of 32,001 on two devices).
    """
    if axes is None:
        axes = (None,) * len(shape)
    spec = []
    for axis, size in zip(axes, shape, strict=True):
        mesh_axis = LOGICAL_AXIS_RULES.get(axis) if axis else None
        spec.append(mesh_axis if mesh_axis and size % mesh.shape[mesh_axis] == 0 else None)
    return NamedSharding(mesh, PartitionSpec(*spec))
