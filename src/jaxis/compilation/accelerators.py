"""Accelerators by name, with the figures of their data sheets.

All figures are for one device as JAX counts them: a chip of v4 or v5p, whose two cores work as one, half a chip of
TPU7x, a GPU. Rates are peaks without sparsity.

Sources: the pages "TPU v4", "TPU v5e", "TPU v5p", "TPU v6e" and "TPU7x (Ironwood)" under
https://docs.cloud.google.com/tpu/docs, and NVIDIA's data sheets of A100, H100 and H200 (SXM) and HGX B200. What a
program may use of a TPU's memory is what libtpu says when it refuses one that is too large. A GPU's network is that
of NVIDIA's DGX servers, which have an adapter for each GPU: of 200 Gb/s beside A100, of 400 Gb/s beside the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from jaxis.engine.execution.cache_memory import DEFAULT_GPU_MEMORY_UTILIZATION

GIB = 1 << 30


@dataclass(frozen=True)
class Accelerator:
    """One device.

    Attributes:
      name: User's name of it, such as "v6e" or "h100".
      device_kind: JAX's name of the device.
      usable_bytes: HBM that programs and arrays may take.
      memory_bandwidth: Bytes a second from and to HBM.
      flops: Operations a second, two for each multiplication and addition, by type of the matrix units: "bfloat16",
        "int8" and "float8".
      interconnect_bandwidth: Bytes a second that it can send to others of its kind, over all its links.
      network_bandwidth: Bytes a second that it can send to devices of other hosts; None where the same links lead
        there.
      cores_per_device: Cores of a device, as Google counts them in a name such as "v5p-8".
    """

    name: str
    device_kind: str
    platform: str
    memory_bytes: int
    usable_bytes: int
    memory_bandwidth: float
    flops: Mapping[str, float]
    interconnect_bandwidth: float
    network_bandwidth: float | None = None
    cores_per_device: int = 1


def _tpu(
    name: str,
    device_kind: str,
    memory_gib: float,
    usable_gib: float,
    memory_bandwidth: float,
    flops: Mapping[str, float],
    interconnect_bandwidth: float,
    cores_per_device: int = 1,
) -> Accelerator:
    memory, usable = int(memory_gib * GIB), int(usable_gib * GIB)
    return Accelerator(
        name,
        device_kind,
        "tpu",
        memory,
        usable,
        memory_bandwidth,
        flops,
        interconnect_bandwidth,
        cores_per_device=cores_per_device,
    )


def _gpu(
    name: str,
    device_kind: str,
    memory_bytes: int,
    memory_bandwidth: float,
    flops: Mapping[str, float],
    interconnect_bandwidth: float,
    network_bandwidth: float,
) -> Accelerator:
    usable = int(memory_bytes * DEFAULT_GPU_MEMORY_UTILIZATION)
    return Accelerator(
        name,
        device_kind,
        "gpu",
        memory_bytes,
        usable,
        memory_bandwidth,
        flops,
        interconnect_bandwidth,
        network_bandwidth,
    )


_AMPERE_FLOPS = {"bfloat16": 312e12, "int8": 624e12}
_HOPPER_FLOPS = {"bfloat16": 989e12, "int8": 1979e12, "float8": 1979e12}

ACCELERATORS: Mapping[str, Accelerator] = {
    accelerator.name: accelerator
    for accelerator in (
        _tpu("v4", "TPU v4", 32, 30.75, 1200e9, {"bfloat16": 275e12, "int8": 275e12}, 300e9, 2),
        _tpu("v5e", "TPU v5 lite", 16, 15.75, 819e9, {"bfloat16": 197e12, "int8": 393e12}, 200e9),
        _tpu("v5p", "TPU v5", 96, 95.74, 2765e9, {"bfloat16": 459e12, "int8": 918e12}, 600e9, 2),
        _tpu("v6e", "TPU v6 lite", 32, 31.25, 1640e9, {"bfloat16": 918e12, "int8": 1836e12}, 448e9),
        # Half a chip of 192 GiB, 7,380 GB/s, 2,307 and 4,614 TFLOPS, 1,200 GB/s in both directions.
        _tpu("tpu7x", "TPU7x", 96, 94.75, 3690e9, {"bfloat16": 1153.5e12, "float8": 2307e12}, 300e9),
        _gpu("a100", "NVIDIA A100-SXM4-80GB", 85_100_068_864, 2039e9, _AMPERE_FLOPS, 300e9, 25e9),
        _gpu("h100", "NVIDIA H100 80GB HBM3", 84_942_979_072, 3352e9, _HOPPER_FLOPS, 450e9, 50e9),
        _gpu("h200", "NVIDIA H200", 150_754_820_096, 4800e9, _HOPPER_FLOPS, 450e9, 50e9),
        _gpu(
            "b200",
            "NVIDIA B200",
            191_512_051_712,
            7700e9,
            {"bfloat16": 2250e12, "int8": 4500e12, "float8": 4500e12},
            900e9,
            50e9,
        ),
    )
}
