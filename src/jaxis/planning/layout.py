"""Ways in which the devices of one server share a model."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from jaxis.compilation.accelerators import Accelerator
from jaxis.compilation.targets import Target
from jaxis.engine.arguments import EngineArgs
from jaxis.errors import ConfigError
from jaxis.parallel.mesh import MESH_AXES
from jaxis.parallel.stages import Stage


@dataclass(frozen=True)
class Layout:
    """A server's `(data, model)` mesh, or one for each pipeline stage.

    Attributes:
      tensor_parallel_size: Devices that share the attention and dense layers of the same requests.
      data_parallel_size: Groups of such devices, each with requests of its own.
      enable_expert_parallel: True if experts lie whole on all these devices; otherwise each group has all of them.
      decode_context_parallel_size: Devices that share the tokens of a cache of latents: 1, or all of a group.
      pipeline_parallel_size: Stages that the layers are divided among, each with a mesh of its own.
    """

    tensor_parallel_size: int = 1
    data_parallel_size: int = 1
    enable_expert_parallel: bool = False
    decode_context_parallel_size: int = 1
    pipeline_parallel_size: int = 1

    def __str__(self) -> str:
        parts = []
        if self.data_parallel_size > 1:
            parts = [f"TP{self.tensor_parallel_size}", f"DP{self.data_parallel_size}"]
        elif self.enable_expert_parallel:
            parts = ["EP"]
        if self.decode_context_parallel_size > 1:
            parts.append(f"DCP{self.decode_context_parallel_size}")
        if self.pipeline_parallel_size > 1:
            parts = [*(parts or [f"TP{self.tensor_parallel_size}"]), f"PP{self.pipeline_parallel_size}"]
        return f"{self.num_devices} ({' '.join(parts)})" if parts else str(self.num_devices)

    @property
    def in_words(self) -> str:
        """The layout in a sentence, such as "8 devices (TP 2, DP 4, EP)"."""
        parts = [f"TP {self.tensor_parallel_size}"]
        if self.data_parallel_size > 1:
            parts.append(f"DP {self.data_parallel_size}")
        if self.enable_expert_parallel:
            parts.append("EP")
        if self.decode_context_parallel_size > 1:
            parts.append(f"DCP {self.decode_context_parallel_size}")
        if self.pipeline_parallel_size > 1:
            parts.append(f"PP {self.pipeline_parallel_size}")
        devices = "1 device" if self.num_devices == 1 else f"{self.num_devices} devices"
        return f"{devices} ({', '.join(parts)})" if len(parts) > 1 else devices

    @property
    def num_devices(self) -> int:
        return self.tensor_parallel_size * self.data_parallel_size * self.pipeline_parallel_size

    @property
    def stages(self) -> tuple[Stage, ...]:
        number = self.pipeline_parallel_size
        return tuple(Stage(index, number) for index in range(number))

    def mesh(self, accelerator: Accelerator | None = None) -> AbstractMesh:
        """Makes a mesh of absent devices to ask for shardings with; with an accelerator, for shapes too."""
        device = accelerator and AbstractDevice(accelerator.device_kind, None, accelerator.platform)
        sizes = (self.data_parallel_size, self.tensor_parallel_size)
        return AbstractMesh(sizes, MESH_AXES, axis_types=(AxisType.Auto,) * 2, abstract_device=device)

    def num_hosts(self, target: Target) -> int:
        return -(-self.num_devices // target.devices_per_host)


@dataclass(frozen=True)
class WantedLayout:
    """Requirements for a layout. None leaves the choice to the plan, but the last two are never chosen: None is 1."""

    tensor_parallel_size: int | None = None
    data_parallel_size: int | None = None
    enable_expert_parallel: bool | None = None
    decode_context_parallel_size: int | None = None
    pipeline_parallel_size: int | None = None


ANY_LAYOUT = WantedLayout()


def layouts(target: Target, wanted: WantedLayout, num_experts: int) -> list[Layout]:
    """Lists the ways to lay a model out on a target, as far as its experts allow; its heads may not.

    Data ranks have only experts in common. Without any, they are servers of their own. Raises ConfigError if no layout
    meets the requirements.
    """
    _check(target, wanted, num_experts)
    found = [layout for layout in _candidates(target, wanted, num_experts) if _fits_hosts(target, layout)]
    if found and (wanted.pipeline_parallel_size or 1) > 1:
        found = _accepted(found, target)
    if not found:
        raise ConfigError(
            f"{options_of(wanted)}: {target} with its {target.num_devices} devices, {target.devices_per_host} on each "
            "host, cannot be shared so"
            + (f", or not by {num_experts} experts" if num_experts else "")
            + ": a server takes devices of one host, or those of all hosts"
        )
    return found


def _candidates(target: Target, wanted: WantedLayout, num_experts: int) -> Iterator[Layout]:
    sizes = [size for size in range(1, target.num_devices + 1) if target.num_devices % size == 0]
    context_size = wanted.decode_context_parallel_size or 1
    model_sizes = sizes if wanted.tensor_parallel_size is None else [wanted.tensor_parallel_size]
    model_sizes = [size for size in model_sizes if context_size in (1, size)]
    data_sizes = [wanted.data_parallel_size] if wanted.data_parallel_size else sizes if num_experts else [1]
    for model in model_sizes:
        for data in data_sizes:
            spreads_experts = bool(wanted.enable_expert_parallel or data > 1)
            layout = Layout(model, data, spreads_experts, context_size, wanted.pipeline_parallel_size or 1)
            is_shared = not spreads_experts or num_experts % (model * data) == 0
            if layout.num_devices <= target.num_devices and is_shared:
                yield layout


def _accepted(found: list[Layout], target: Target) -> list[Layout]:
    """Returns the layouts, with pipeline stages, that the engine runs. Raises ConfigError if there are none."""
    accepted = []
    for layout in found:
        try:
            EngineArgs(**dataclasses.asdict(layout), nnodes=layout.num_hosts(target))
        except ConfigError:
            if layout is found[-1] and not accepted:
                raise
        else:
            accepted.append(layout)
    return accepted


def _fits_hosts(target: Target, layout: Layout) -> bool:
    """Returns whether its hosts are whole ones; of a TPU's slice, whose hosts start together, all."""
    if layout.num_hosts(target) == 1:
        return True
    if target.accelerator.platform == "tpu":
        return layout.num_devices == target.num_devices
    return layout.num_devices % target.devices_per_host == 0


def _check(target: Target, wanted: WantedLayout, num_experts: int) -> None:
    context_size = wanted.decode_context_parallel_size or 1
    if context_size > 1 and wanted.tensor_parallel_size not in (None, context_size):
        raise ConfigError(
            f"--decode-context-parallel-size {context_size} must be 1 or --tensor-parallel-size "
            f"{wanted.tensor_parallel_size}: all devices that share the model, or none, share its context"
        )
    for name, size in dataclasses.asdict(wanted).items():
        if name.endswith("_size") and not 1 <= (size or 1) <= target.num_devices:
            raise ConfigError(f"--{name.replace('_', '-')} {size}: {target} has {target.num_devices} devices")
    if num_experts:
        return
    if (wanted.data_parallel_size or 1) > 1:
        raise ConfigError(
            f"--data-parallel-size {wanted.data_parallel_size}: the model has no experts to share between data ranks: "
            "start that many servers behind a load balancer instead"
        )
    if wanted.enable_expert_parallel:
        raise ConfigError("--enable-expert-parallel: the model has no experts: leave it out")


def options_of(layout: Layout | WantedLayout) -> str:
    """Returns the options of `jaxis serve` and `jaxis plan` for what differs from the class' defaults."""
    parts = []
    for each in dataclasses.fields(layout):
        if (size := getattr(layout, each.name)) and size != each.default:
            option = f"--{each.name.replace('_', '-')}"
            parts.append(option if size is True else f"{option} {size}")
    return " ".join(parts)
