"""Products of rows with the weight of each row's group: the building block of mixture-of-experts layers.

`reference.py` is the definition, `loop.py` the same on CPU, `tpu.py` and `gpu.py` are kernels for accelerators;
`kernels.weights.grouped` has the product over any weight. `packed.py` is the native kernel of a whole layer of experts.
"""

from __future__ import annotations

from types import ModuleType

import jax
from jax.sharding import AxisType

from jaxis.kernels.platform import target_platform


def accelerator_kernels() -> ModuleType | None:
    """`kernels_of_platform`; None if XLA divides the program between devices.

    It cannot divide a kernel: on several devices, kernels are called where `shard_map` did.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.size > 1 and any(kind != AxisType.Manual for kind in mesh.axis_types):
        return None
    return kernels_of_platform()


def kernels_of_platform() -> ModuleType | None:
    """`tpu.py` or `gpu.py`, if a program traced now runs there, else None."""
    # Imported here because Pallas takes long to import.
    if target_platform() == "tpu":
        from jaxis.kernels.grouped_matmul import tpu

        return tpu
    if target_platform() == "gpu":
        from jaxis.kernels.grouped_matmul import gpu

        return gpu
    return None
