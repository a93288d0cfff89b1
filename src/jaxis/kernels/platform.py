"""Which platform a program is traced for."""

from __future__ import annotations

import jax


def target_platform() -> str:
    """The platform of the current mesh's devices, "cpu", "gpu" or "tpu"; without a mesh, of JAX's default backend.

    A mesh may be of devices that are not there (a topology that a compiler knows); then the machine that traces says
    nothing about the one that will run.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None else device.platform
