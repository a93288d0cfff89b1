"""Products of rows with the weight of each row's group: the building block of mixture-of-experts layers.

`reference.py` is the definition, `loop.py` runs on CPU, and `tpu.py` and `gpu.py` have kernels for accelerators.
`kernels.weights` has the product with any weight (`grouped_experts`) and the native kernel (`packed_weight`).
"""

from __future__ import annotations

from types import ModuleType

from jaxis.kernels.platform import can_call_kernels, target_platform


def accelerator_kernels() -> ModuleType | None:
    """Returns `kernels_of_platform()`, or None where kernels cannot be called."""
    return kernels_of_platform() if can_call_kernels() else None


def kernels_of_platform() -> ModuleType | None:
    """Returns the module `tpu` or `gpu` if a program traced now runs there, else None."""
    # Imported here because Pallas takes long to import.
    if target_platform() == "tpu":
        from jaxis.kernels.grouped_matmul import tpu

        return tpu
    if target_platform() == "gpu":
        from jaxis.kernels.grouped_matmul import gpu

        return gpu
    return None
