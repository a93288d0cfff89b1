"""Machines to plan and compile for, by name: `v6e-8`, `v5e:2x4`, `h100x8`.

The compilers of TPUs (libtpu) and of NVIDIA's GPUs (XLA's CUDA plugin) describe devices that are not present. A mesh of
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
from jaxis.compilation.gpu_description import gpu_target_config
from jaxis.errors import ConfigError, EngineError

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
    """Devices of one kind, connected with each other, as JAX counts them; the grid is that of a TPU's chips, () for
    GPUs.
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
        """Number of devices that one process can have: one host's.

        A GPU server has 8. A TPU host has 4 chips (of TPU7x, 8 devices), but the hosts of v5e-8 and v6e-8 have all 8.
        """
        if self.accelerator.platform == "gpu" or self.accelerator.name == "tpu7x":
            return _GPUS_PER_HOST
        return 8 if self.accelerator.name in ("v5e", "v6e") and self.num_devices == 8 else 4

    def missing_compiler(self) -> str | None:
        """Tells what to install so that programs can be compiled for it; returns None if the compiler is installed."""
        module, extra = _COMPILERS[self.accelerator.platform]
        if importlib.util.find_spec(module) is not None:
            return None
        return f"compiling for {self.accelerator.name} needs {module}: pip install 'jaxis[{extra}]'"

    def devices(self) -> list[Any]:
        """Returns the devices as their compiler describes them: programs can be compiled for them, not run.

        A process can compile for any number of TPUs, but for one kind of GPU only. `JAX_PLATFORMS` should be "cpu".
        Raises ConfigError if the compiler is not installed, and EngineError if the compiler does not know the devices.
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
    """Parses the name of a target.

    A TPU has Google's name (`v6e-8` has 8 chips; `v5p-8`, `v4-8` and `tpu7x-8` have 8 cores, which are 4 chips) or its
    grid of chips (`v5e:2x4`). A GPU has a number (`h100x8`, `h100-8`). A name alone is the smallest. Raises ConfigError
    if the name or number is unknown.
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
