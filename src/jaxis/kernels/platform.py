"""Platform that programs are traced for, and its support for kernels."""

from __future__ import annotations

import jax
from jax.sharding import AxisType

AMPERE = 8  # the major number of its compute capability


def target_platform() -> str:
    """Returns the platform of the current mesh's devices: "cpu", "gpu" or "tpu". Without a mesh, JAX's default backend.

    A mesh may consist of devices that are not present (a topology that a compiler knows), so that the machine that
    traces a program may have another platform.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None else device.platform


def can_call_kernels() -> bool:
    """Returns whether a program traced now may call a kernel.

    XLA divides a program between several devices, but cannot divide a kernel: kernels are called inside `shard_map`.
    """
    mesh = jax.sharding.get_abstract_mesh()
    return mesh.size <= 1 or all(kind == AxisType.Manual for kind in mesh.axis_types)


def supports_triton() -> bool:
    """Returns whether the target's devices run Triton kernels: NVIDIA GPUs since Ampere."""
    if target_platform() != "gpu":
        return False
    try:
        device = jax.local_devices(backend="gpu")[0]
    except RuntimeError:
        return True  # a program for an absent GPU: compilers describe none that is older
    major = str(getattr(device, "compute_capability", "")).partition(".")[0]
    return major.isdigit() and int(major) >= AMPERE  # AMD has names, such as gfx942
