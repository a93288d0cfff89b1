"""The memory that the caches may take."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax

from jaxis.errors import EngineError
from jaxis.host.machine import free_host_bytes, host_bytes

if TYPE_CHECKING:
    from jaxis.config import VllmConfig

GIB = 1 << 30

# Share of a device's memory for weights, cache and a step's temporaries together.
ACCELERATOR_MEMORY_SHARE = 0.9
# On CPU the cache is main memory, which other programs need too.
CPU_FREE_MEMORY_SHARE = 0.25
CPU_DEFAULT_LIMIT_BYTES = 2 * GIB

# Share of a GPU's memory that JAX takes when it starts; its own default is 0.75.
DEFAULT_GPU_MEMORY_UTILIZATION = 0.9
# The name that JAX reads, and the one it had before.
_GPU_MEMORY_VARIABLES = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")


def set_gpu_memory_utilization(share: float | None) -> None:
    """Sets the share of each GPU's memory that JAX takes; without effect once JAX has looked for devices.

    None leaves the share to the environment, or to the default 0.9 if the environment says nothing.
    """
    name, former_name = _GPU_MEMORY_VARIABLES
    if share is None and (os.environ.get(name) or os.environ.get(former_name)):
        return
    os.environ.pop(former_name, None)  # JAX refuses both
    os.environ[name] = str(DEFAULT_GPU_MEMORY_UTILIZATION if share is None else share)


def available_bytes(mesh: jax.sharding.Mesh) -> int:
    """Returns the memory that the cache may use, over all devices of this host, once the weights are loaded."""
    devices = list(mesh.local_devices)
    if devices[0].platform == "cpu":
        return min(int(free_host_bytes() * CPU_FREE_MEMORY_SHARE), CPU_DEFAULT_LIMIT_BYTES)
    if (free := free_device_bytes([mesh])) is None:
        raise EngineError(f"{devices[0]} does not say how much memory it has: give kv_cache_memory")
    return free


def usable_bytes(memory: int) -> int:
    """Returns the bytes of a device's memory that weights, caches and a step's temporaries may take."""
    return int(memory * ACCELERATOR_MEMORY_SHARE)


def free_device_bytes(meshes: Sequence[jax.sharding.Mesh]) -> int | None:
    """Returns the usable bytes free on this host's accelerators, as many on each; None if one does not report them."""
    stats = [device.memory_stats() or {} for mesh in meshes for device in mesh.local_devices]
    if any("bytes_limit" not in each for each in stats):
        return None
    least = min(usable_bytes(each["bytes_limit"]) - each.get("bytes_in_use", 0) for each in stats)
    return max(0, least) * len(stats)


def machine_memory() -> tuple[str, list[int]]:
    """Returns the name of this machine's memory for models ("RAM" or "NVIDIA H100"), and the bytes of each device.

    Devices of a CPU share the main memory equally.
    """
    devices = jax.local_devices()
    if devices[0].platform == "cpu":
        return "RAM", [host_bytes() // len(devices)] * len(devices)
    limits = [(device.memory_stats() or {}).get("bytes_limit", 0) for device in devices]
    return f"{len(devices)} x {devices[0].device_kind}", limits


def cache_memory(vllm_config: VllmConfig, mesh: jax.sharding.Mesh) -> int:
    """Returns the bytes of all caches: the configured ones, or else those available."""
    memory = vllm_config.cache_config.kv_cache_memory_bytes
    return available_bytes(mesh) if memory is None else memory


def check_is_free(num_bytes: int) -> None:
    """Raises an EngineError if the main memory cannot hold caches of so many bytes."""
    if num_bytes > (free := free_host_bytes()):
        # The operating system would grant this memory, and kill the process once it is used.
        raise EngineError(
            f"the KV cache would take {num_bytes / GIB:.1f} GiB, and {free / GIB:.1f} GiB of memory are free: give a "
            "smaller kv_cache_memory"
        )
