"""Machines to plan and compile for, by name: `v6e-8`, `v5e:2x4`, `h100x8`.

The compilers of TPUs (libtpu) and of NVIDIA's GPUs (XLA's CUDA plugin) describe devices that are not there; a mesh of
such devices is enough to lower and compile a program, though not to run it.
"""

from __future__ import annotations

import importlib.util
import math
import os
import re
from dataclasses import dataclass
from typing import Any

import jax
from jax.experimental import topologies

from jaxis.compilation.accelerators import ACCELERATORS, Accelerator
from jaxis.errors import ConfigError, EngineError

# The description of a GPU that XLA's compiler takes in place of the GPU itself.


@dataclass(frozen=True)
class _Chip:
    """What a compiler asks of a GPU, from NVIDIA's architecture papers and XLA's own descriptions of these chips.

    Attributes:
      major: Of the compute capability.
      minor: Of the compute capability.
      has_accelerated_features: Whether code may use what only this architecture has (`sm_90a`).
      cores: Streaming multiprocessors.
      lanes: Float32 units of a multiprocessor.
      core_shared_memory: Bytes of shared memory of a multiprocessor.
      block_shared_memory: Bytes of it that one block can have.
      l2_cache: Bytes.
      clock_ghz: The boost clock.
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
    """XLA's `GpuTargetConfigProto` of a GPU, as text."""
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


_NAME = re.compile(r"(?P<name>[a-z0-9]+?)(?:-(?P<cores>\d+)|x(?P<count>\d+)|:(?P<grid>\d+(?:x\d+)+))?")
# Chips of a TPU's slice -> its grid; smaller than a host, and then hosts of four chips.
_GRIDS_2D = {1: (1, 1), 4: (2, 2), 8: (2, 4), 16: (4, 4), 32: (4, 8), 64: (8, 8), 128: (8, 16), 256: (16, 16)}
_GRIDS_3D = {
    4: (2, 2, 1), 8: (2, 2, 2), 16: (2, 2, 4), 32: (2, 4, 4), 64: (4, 4, 4), 128: (4, 4, 8), 256: (4, 8, 8),
    512: (8, 8, 8),
}  # fmt: skip
_GRIDS = {"v5e": _GRIDS_2D, "v6e": _GRIDS_2D, "v4": _GRIDS_3D, "v5p": _GRIDS_3D, "tpu7x": _GRIDS_3D}
_GPUS_PER_HOST = 8
# Platform -> (a module of its compiler, the extra that brings it).
_COMPILERS = {"tpu": ("libtpu", "compile-tpu"), "gpu": ("jax_cuda13_plugin", "compile-gpu")}
# So that libtpu asks no metadata server what machine this is, does not complain that there is none, and lets several
# processes compile: without a TPU there is nothing to lock.
_NO_TPU_HERE = {
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
}


@dataclass(frozen=True)
class Target:
    """Devices of one kind, connected with each other.

    Attributes:
      accelerator: One of the devices.
      num_devices: How many JAX sees.
      grid: How a TPU's chips are connected; () for GPUs.
    """

    accelerator: Accelerator
    num_devices: int
    grid: tuple[int, ...] = ()

    def __str__(self) -> str:
        if self.grid:
            return f"{self.accelerator.name}:{'x'.join(map(str, self.grid))}"
        return f"{self.accelerator.name}x{self.num_devices}"

    @property
    def devices_per_host(self) -> int:
        """How many of the devices one process can have: those of one host.

        A GPU server has 8. A TPU host has 4 chips (of TPU7x, 8 devices), but the hosts of v5e-8 and v6e-8 have all 8.
        """
        if self.accelerator.platform == "gpu" or self.accelerator.name == "tpu7x":
            return _GPUS_PER_HOST
        return 8 if self.accelerator.name in ("v5e", "v6e") and self.num_devices == 8 else 4

    def missing_compiler(self) -> str | None:
        """What to install so that programs can be compiled for it; None if it is there."""
        module, extra = _COMPILERS[self.accelerator.platform]
        if importlib.util.find_spec(module) is not None:
            return None
        return f"compiling for {self.accelerator.name} needs {module}: pip install 'jaxis[{extra}]'"

    def devices(self) -> list[Any]:
        """The devices as their compiler describes them: programs can be compiled for them, not run.

        A process can compile for any number of TPUs, but for one kind of GPU only. `JAX_PLATFORMS` should be "cpu".

        Raises:
          ConfigError: The compiler is not installed.
          EngineError: The compiler does not know the devices.
        """
        if (missing := self.missing_compiler()) is not None:
            raise ConfigError(missing)
        try:
            topology = self._tpu_topology() if self.accelerator.platform == "tpu" else self._gpu_topology()
        except (jax.errors.JaxRuntimeError, NotImplementedError, RuntimeError) as error:
            raise EngineError(
                f"the compiler does not describe {self}: {str(error).splitlines()[0]} (is JAX_PLATFORMS=cpu set?)"
            ) from error
        return list(topology.devices)

    def _tpu_topology(self) -> topologies.TopologyDescription:
        for variable, value in _NO_TPU_HERE.items():
            os.environ.setdefault(variable, value)
        options: dict[str, object] = {}
        if self.accelerator.name == "v4":
            options["chip_config_name"] = "megacore"  # both cores as one device, as JAX has them on the machine
        if math.prod(self.grid) == 1:
            options["chips_per_host_bounds"] = (1, 1, 1)
        name = f"{self.accelerator.name}:{'x'.join(map(str, self.grid))}"
        return topologies.get_topology_desc(platform="tpu", topology_name=name, **options)

    def _gpu_topology(self) -> topologies.TopologyDescription:
        per_host = min(self.num_devices, _GPUS_PER_HOST)
        return topologies.get_topology_desc(
            platform="cuda",
            topology_name=self.accelerator.name,
            topology=f"1x{self.num_devices // per_host}x{per_host}",  # partitions, hosts, devices of a host
            target_config=gpu_target_config(self.accelerator),
        )


def parse_target(text: str) -> Target:
    """The target of a name.

    Args:
      text: A TPU as Google names it (`v6e-8` has 8 chips; `v5p-8`, `v4-8` and `tpu7x-8` have 8 cores, which are 4
        chips) or by its grid of chips (`v5e:2x4`); a GPU with a number (`h100x8`, `h100-8`). Alone, the smallest.

    Raises:
      ConfigError: A name or a number that is not known.
    """
    match = _NAME.fullmatch(text.strip().lower())
    if match is None or match["name"] not in ACCELERATORS:
        known = ", ".join(ACCELERATORS)
        raise ConfigError(f"{text!r} is no accelerator: give one of {known}, as in v6e-8, v5e:2x4 or h100x8")
    accelerator = ACCELERATORS[match["name"]]
    if accelerator.platform == "gpu":
        return _gpus(accelerator, match, text)
    return _tpus(accelerator, match, text)


def _gpus(accelerator: Accelerator, match: re.Match[str], text: str) -> Target:
    count = int(match["cores"] or match["count"] or 1)
    if match["grid"] or count < 1 or (count > _GPUS_PER_HOST and count % _GPUS_PER_HOST):
        raise ConfigError(
            f"{text!r}: give a number of GPUs, up to {_GPUS_PER_HOST} or a multiple of it, as in {accelerator.name}x8"
        )
    return Target(accelerator, count)


def _tpus(accelerator: Accelerator, match: re.Match[str], text: str) -> Target:
    grids = _GRIDS[accelerator.name]
    devices_per_chip = _devices_per_chip(accelerator)
    cores_per_chip = devices_per_chip * accelerator.cores_per_device
    if match["grid"]:
        grid = tuple(map(int, match["grid"].split("x")))
        grid += (1,) * (len(next(iter(grids.values()))) - len(grid))
        chips = math.prod(grid)
    elif match["count"]:
        chips, left = divmod(int(match["count"]), devices_per_chip)
        grid = grids.get(0 if left else chips)
    else:
        chips, left = divmod(int(match["cores"] or min(grids) * cores_per_chip), cores_per_chip)
        grid = grids.get(0 if left else chips)
    if grid is None or grids.get(chips) != grid:
        names = ", ".join(f"{accelerator.name}-{chips * cores_per_chip}" for chips in grids)
        shapes = ", ".join("x".join(map(str, grid)) for grid in grids.values())
        raise ConfigError(f"{text!r} is no slice of {accelerator.name}: give {names}, or a grid of chips: {shapes}")
    return Target(accelerator, chips * devices_per_chip, grid)


def _devices_per_chip(accelerator: Accelerator) -> int:
    return 2 if accelerator.name == "tpu7x" else 1
