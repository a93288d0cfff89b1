"""The device mesh, and the one table that maps a tensor's logical axes to mesh axes."""

from __future__ import annotations

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from jaxis.errors import ConfigError

MESH_AXES = ("data", "expert", "model")

# Logical axis of a parameter or cache -> mesh axis that it is split over. An axis not named here is replicated.
LOGICAL_AXIS_RULES: dict[str, str] = {
    "heads": "model",
    "kv_heads": "model",
    "mlp": "model",
    "vocab": "model",
    "expert": "expert",
}


def make_mesh(tensor_parallel_size: int = 1) -> Mesh:
    """A `(data, expert, model)` mesh over the first `tensor_parallel_size` local devices.

    Raises:
      ConfigError: There are fewer devices.
    """
    devices = jax.local_devices()
    if not 1 <= tensor_parallel_size <= len(devices):
        raise ConfigError(
            f"tensor_parallel_size={tensor_parallel_size} needs that many {devices[0].platform} devices; "
            f"{len(devices)} found"
        )
    grid = np.asarray(devices[:tensor_parallel_size]).reshape(1, 1, tensor_parallel_size)
    return Mesh(grid, MESH_AXES, axis_types=(AxisType.Auto,) * 3)


def devices_of_layer() -> int:
    """How many devices of the current mesh share each layer; 1 without a mesh."""
    mesh = jax.sharding.get_abstract_mesh()
    return 1 if mesh.empty else mesh.shape["model"]


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
