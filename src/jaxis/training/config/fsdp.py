from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from jaxis.config.parameter_group import ParameterGroup
from jaxis.training.config.reasons import TORCH_ONLY


@dataclass(frozen=True, kw_only=True)
class FSDPParams(ParameterGroup):
    """Sharing of a training's batch rows, weights and optimizer state by several devices.

    Attributes:
      enable_fsdp: True to use all devices of this host. `training.per_device_train_batch_size` applies to each device.
      sharding_strategy: Only FULL_SHARD.
    """

    enable_fsdp: bool = False
    sharding_strategy: str = "FULL_SHARD"
    cpu_offload: bool = False
    mixed_precision: str | None = None
    backward_prefetch: str = "BACKWARD_PRE"
    forward_prefetch: bool = False
    use_orig_params: bool | None = None
    state_dict_type: str = "FULL_STATE_DICT"
    auto_wrap_policy: str = "NO_WRAP"
    min_num_params: int = 100_000
    transformer_layer_cls: str | None = None
    sync_module_states: bool = True

    WITHOUT_EFFECT: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("backward_prefetch", "forward_prefetch", "use_orig_params", "sync_module_states"), TORCH_ONLY),
        **dict.fromkeys(
            ("auto_wrap_policy", "min_num_params", "transformer_layer_cls"), "each layer gathers its weights"
        ),
        "state_dict_type": "checkpoints have whole arrays",
    }
    REFUSED: ClassVar[Mapping[str, str]] = {
        "sharding_strategy": "give FULL_SHARD",
        "cpu_offload": "weights stay on the devices; leave it out",
        "mixed_precision": "give training.mixed_precision_dtype",
    }

    @classmethod
    def section(cls) -> str:
        return "fsdp"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check("enable_fsdp", bool, "true or false")
