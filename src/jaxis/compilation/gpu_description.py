"""The description of a GPU that XLA's compiler takes in place of the GPU itself."""

from __future__ import annotations

from dataclasses import dataclass

from jaxis.compilation.accelerators import Accelerator


@dataclass(frozen=True)
class _Chip:
    """Properties of a GPU for a compiler, from NVIDIA's architecture papers and XLA's own descriptions of these chips.

    `major` and `minor` are the compute capability, and accelerated features are those of only this architecture
    (`sm_90a`). There are so many streaming multiprocessors (`cores`), each with float32 units (`lanes`) and bytes of
    shared memory. The clock is the boost clock.
    """

    major: int
    minor: int
    has_accelerated_features: bool
    cores: int
    lanes: int
    core_shared_memory: int
    block_shared_memory: int
    l2_cache: int
    clock_ghz: float


_HOPPER = _Chip(9, 0, True, 132, 128, 233_472, 232_448, 52_428_800, 1.98)
_CHIPS = {
    "a100": _Chip(8, 0, False, 108, 64, 167_936, 166_912, 41_943_040, 1.41),
    "h100": _HOPPER,
    "h200": _HOPPER,
    "b200": _Chip(10, 0, True, 148, 128, 233_472, 232_448, 132_644_864, 1.965),
}


def gpu_target_config(gpu: Accelerator) -> str:
    """Writes XLA's `GpuTargetConfigProto` of a GPU."""
    chip = _CHIPS[gpu.name]
    features = "ACCELERATED_FEATURES" if chip.has_accelerated_features else "NONE"
    return f"""
platform_name: "CUDA"
device_description_str: "{gpu.device_kind}"
dnn_version_info {{ major: 9 minor: 12 patch: 0 }}
gpu_device_info {{
  name: "{gpu.device_kind}" device_vendor: "NVIDIA Corporation"
  cuda_compute_capability {{ major: {chip.major} minor: {chip.minor} feature_extension: {features} }}
  driver_version: "13.0.0" runtime_version: "13.0.0" compile_time_toolkit_version: "13.0.0" dnn_version: "9.12.0"
  core_count: {chip.cores} fpus_per_core: {chip.lanes} clock_rate_ghz: {chip.clock_ghz} threads_per_warp: 32
  threads_per_block_limit: 1024 threads_per_core_limit: 2048
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  shared_memory_per_block: 49152
  shared_memory_per_core: {chip.core_shared_memory} shared_memory_per_block_optin: {chip.block_shared_memory}
  memory_bandwidth: {int(gpu.memory_bandwidth)} l2_cache_size: {chip.l2_cache} device_memory_size: {gpu.memory_bytes}
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
}}"""
