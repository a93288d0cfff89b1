"""Arguments of the devices and hosts that share a model."""

from __future__ import annotations

from dataclasses import dataclass

from jaxis.engine.argument_groups.caches import CacheArguments
from jaxis.engine.argument_groups.combinations import EngineFeature
from jaxis.engine.argument_groups.info import argument
from jaxis.errors import ConfigError


@dataclass(frozen=True)
class DeviceArguments(CacheArguments):
    """Numbers of devices, stages, ranks and hosts."""

    tensor_parallel_size: int = argument(
        1,
        description="Devices to spread the model over, those of all hosts together.",
        config="ParallelConfig",
        minimum=1,
        short="-tp",
        metavar="N",
        help="Devices to spread the model over.",
        panel="Devices",
        speed_only=True,
    )
    pipeline_parallel_size: int = argument(
        1,
        description=(
            "Stages that the layers are divided among, each on `tensor_parallel_size` devices of its own. See "
            "[pipeline stages](several-machines.md#pipeline-stages)."
        ),
        minimum=1,
        short="-pp",
        metavar="N",
        help="Stages that share the layers, each with so many devices of its own.",
        panel="Devices",
        speed_only=True,
    )
    data_parallel_size: int = argument(
        1,
        description=(
            "For mixtures of experts: ranks of `tensor_parallel_size` devices, each with requests and a KV cache "
            "of its own, which share the experts. See [data ranks](several-machines.md#data-ranks)."
        ),
        config="ParallelConfig",
        minimum=1,
        short="-dp",
        metavar="N",
        help="Ranks of so many devices, each with its own requests, that share a model's experts.",
        panel="Devices",
        speed_only=True,
    )
    enable_expert_parallel: bool = argument(
        False,
        description=(
            "Place the experts of each layer on these devices whole, as many on each, instead of a part of every "
            "expert. Their number must be a multiple of the number of devices. See [experts on several "
            "devices](loading.md#experts-on-several-devices)."
        ),
        config="ParallelConfig",
        help="Place experts on devices whole, not a part of each on every device.",
        panel="Devices: experts and contexts",
        speed_only=True,
    )
    decode_context_parallel_size: int = argument(
        1,
        description=(
            "Number of the model's devices that share a cache of latents (DeepSeek and its kin) by tokens: 1, so "
            "that each has the whole cache, or all. See [the context on several "
            "devices](loading.md#the-context-on-several-devices)."
        ),
        config="ParallelConfig",
        minimum=1,
        metavar="N",
        help="Devices that share the tokens of a cache of latents: 1, or all that share the model.",
        panel="Devices: experts and contexts",
        speed_only=True,
    )
    nnodes: int = argument(
        1,
        room="engine.hosts",
        description=(
            "Hosts that run the model together; each of the others runs `jaxis serve --nnodes N --node-rank R`. "
            "See [several hosts](several-machines.md#several-hosts)."
        ),
        minimum=1,
        speed_only=True,
    )
    master_addr: str = argument(
        "127.0.0.1",
        in_fingerprint=False,
        description="The address of this host by which the others reach it, if there are any.",
        speed_only=True,
    )
    master_port: int = argument(
        29501, in_fingerprint=False, description="A free port there.", minimum=1, speed_only=True
    )
    distributed_timeout_seconds: int = argument(
        300,
        in_fingerprint=False,
        description="Seconds that hosts wait for each other at the start.",
        minimum=1,
        speed_only=True,
    )

    def check(self) -> None:
        stages, ranks = self.pipeline_parallel_size, self.data_parallel_size
        if stages > 1 and max(stages, self.nnodes) % min(stages, self.nnodes):
            raise ConfigError(
                f"pipeline_parallel_size={stages} and nnodes={self.nnodes}: give a multiple of nnodes, so that each "
                "host has whole stages, or a divisor of it, so that each stage has whole hosts"
            )
        if self.num_devices % self.nnodes:
            times = f"data_parallel_size={ranks} times " if ranks > 1 else ""
            raise ConfigError(
                f"{times}tensor_parallel_size={self.tensor_parallel_size} cannot be shared by nnodes={self.nnodes} "
                f"hosts: give a multiple of {self.nnodes}, as many devices as all hosts have together"
            )
        if self.decode_context_parallel_size not in (1, self.tensor_parallel_size):
            raise ConfigError(
                f"decode_context_parallel_size={self.decode_context_parallel_size} must be 1 or "
                f"tensor_parallel_size={self.tensor_parallel_size}: all devices that share the model, or none, share "
                "its context"
            )
        if self.block_size % self.decode_context_parallel_size:
            raise ConfigError(
                f"decode_context_parallel_size={self.decode_context_parallel_size} does not divide "
                f"block_size={self.block_size}: each device has as many tokens of every block; use a multiple"
            )

    def features(self) -> dict[EngineFeature, tuple[bool, str]]:
        sizes = {
            EngineFeature.HOSTS: "nnodes",
            EngineFeature.STAGES: "pipeline_parallel_size",
            EngineFeature.DATA_RANKS: "data_parallel_size",
            EngineFeature.DECODE_CONTEXT: "decode_context_parallel_size",
        }
        return {feature: (getattr(self, name) > 1, f"{name}={getattr(self, name)}") for feature, name in sizes.items()}

    @property
    def num_devices(self) -> int:
        """Number of devices of all data ranks and pipeline stages."""
        return self.data_parallel_size * self.pipeline_parallel_size * self.tensor_parallel_size


def check_ranks_share(args: DeviceArguments) -> None:
    """Raises a ConfigError for data ranks without experts to share."""
    ranks = args.data_parallel_size
    if ranks > 1 and not args.enable_expert_parallel:
        raise ConfigError(
            f"data_parallel_size={ranks} is for mixtures of experts, which the ranks share: add "
            f"enable_expert_parallel; for another model, start {ranks} servers behind a load balancer"
        )
