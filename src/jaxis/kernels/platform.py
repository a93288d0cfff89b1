"""Keeps the operands of a TPU kernel where they are."""

from __future__ import annotations

import jax
from jax.core import Tracer
from jax.sharding import AxisType

AMPERE = 8  # the major number of its compute capability


def target_platform() -> str:
    """The platform of the current mesh's devices, "cpu", "gpu" or "tpu"; without a mesh, of JAX's default backend.

    A mesh may be of devices that are not there (a topology that a compiler knows); then the machine that traces says
    nothing about the one that will run.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None else device.platform


def can_call_kernels() -> bool:
    """Whether a program traced now may call a kernel.

    XLA, which divides the program between several devices, cannot divide a kernel: it is called where `shard_map` did.
    """
    mesh = jax.sharding.get_abstract_mesh()
    return mesh.size <= 1 or all(kind == AxisType.Manual for kind in mesh.axis_types)


def supports_triton() -> bool:
    """Whether the target's devices run Triton kernels: NVIDIA GPUs since Ampere."""
    if target_platform() != "gpu":
        return False
    try:
        device = jax.local_devices(backend="gpu")[0]
    except RuntimeError:
        return True  # A program for a GPU that is not there; the compilers that describe one know none older.
    major = str(getattr(device, "compute_capability", "")).partition(".")[0]
    return major.isdigit() and int(major) >= AMPERE  # AMD's are names, such as gfx942


# Keeps the operands of a TPU kernel where they are.


def in_hbm(operand: jax.Array) -> jax.Array:
    """The operand of a Pallas kernel, to be read from HBM in the blocks that the kernel asks for.

    Without it, XLA may fetch a whole operand into VMEM before the kernel begins, if it fits there: all experts of a
    stack for a step that hits few of them, or a cache, which it then also writes back.
    """
    # Interpreters do not know memories, and the constraint exists in traced programs only.
    if target_platform() != "tpu" or not isinstance(operand, Tracer):
        return operand
    from jax.experimental.pallas import tpu as pltpu  # here, since it takes a tenth of a second to import

    return pltpu.with_memory_space_constraint(operand, pltpu.HBM)
