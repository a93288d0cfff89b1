"""A training run as its YAML file describes it, under Oumi's names.

Each parameter is applied, or refused with the reason. Those of `unused.py` that change no result are accepted, and
`notes` names them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from jaxis.config.parameter_group import ParameterGroup, Unused
from jaxis.engine.model_params import ModelParams
from jaxis.errors import ConfigError
from jaxis.training.config.data import DataParams, DatasetParams, SplitParams, ValidationParams
from jaxis.training.config.distillation import DistillationParams
from jaxis.training.config.grpo import GrpoParams
from jaxis.training.config.peft import PeftParams
from jaxis.training.config.profiler import ProfilerParams, ScheduleParams
from jaxis.training.config.training import TrainingParams
from jaxis.training.config.unused import FSDP

ROUTER_KEYS = ("output_router_logits", "router_aux_loss_coef")
"""Keys of config.json that `model.model_kwargs` can set: use and weight of the routers' load-balancing loss."""
_QUANTIZED = ("load_in_8bit", "load_in_4bit")


@dataclass(frozen=True, kw_only=True)
class TrainedModelParams(ModelParams):
    """The model to train. Fields as for `jaxis infer`; see `ModelParams`.

    Attributes:
      model_max_length: Limit of an example's tokens; longer ones are cut. None: the model's context length.
      torch_dtype_str: Data type of the forward pass; trained weights are always float32. "auto" is float32 on CPU and
        the checkpoint's type elsewhere.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.adapter_model is not None:
            self.refuse("adapter_model", "adapters are trained from their start; merge it into the model first")
        if self.freeze_layers:
            self.refuse("freeze_layers", "all weights are trained, or with training.use_peft adapters alone")
        if self.tool_call_parser is not None:
            self.refuse("tool_call_parser", "it is of answers; leave it out")
        known = {*_QUANTIZED, *ROUTER_KEYS}
        if unknown := sorted(set(self.model_kwargs) - known):
            raise ConfigError(f"model.model_kwargs.{unknown[0]} is not known; known: {', '.join(sorted(known))}")
        if self.model_max_length is not None and (
            not isinstance(self.model_max_length, int) or self.model_max_length < 2
        ):
            raise ConfigError(f"model.model_max_length={self.model_max_length!r} must be an integer from 2")


@dataclass(frozen=True, kw_only=True)
class FSDPParams(ParameterGroup):
    """Sharing of a training's batch rows, weights and optimizer state by several devices.

    Attributes:
      enable_fsdp: True to use all devices of this host. `training.per_device_train_batch_size` applies to each device.
    """

    enable_fsdp: bool = False

    UNUSED: ClassVar[Mapping[str, Unused]] = FSDP

    @classmethod
    def section(cls) -> str:
        return "fsdp"


@dataclass(frozen=True, kw_only=True)
class TrainConfig(ParameterGroup):
    """Configuration of a run, by section; `deepspeed` is refused if enabled."""

    model: TrainedModelParams = field(default_factory=TrainedModelParams)
    data: DataParams = field(default_factory=DataParams)
    training: TrainingParams = field(default_factory=TrainingParams)
    peft: PeftParams = field(default_factory=PeftParams)
    fsdp: FSDPParams = field(default_factory=FSDPParams)
    deepspeed: Any = None

    @classmethod
    def section(cls) -> str:
        return "config"

    @classmethod
    def groups(cls) -> tuple[type[ParameterGroup], ...]:
        data = (DataParams, SplitParams, ValidationParams, DatasetParams)
        sections = (GrpoParams, DistillationParams, ProfilerParams, ScheduleParams)
        return (cls, TrainedModelParams, *data, TrainingParams, *sections, PeftParams, FSDPParams)

    def __post_init__(self) -> None:
        for name, group in {
            "model": TrainedModelParams,
            "data": DataParams,
            "training": TrainingParams,
            "peft": PeftParams,
            "fsdp": FSDPParams,
        }.items():
            object.__setattr__(self, name, group.of(getattr(self, name) or {}))
        value = self.deepspeed
        if value is not None and not (isinstance(value, Mapping) and not value.get("enable_deepspeed", False)):
            self.refuse("deepspeed", "give fsdp")
        if self.training.eval_strategy != "no" and not self.data.validation.datasets:
            raise ConfigError("training.eval_strategy needs data.validation.datasets: name a file there")
        if not self.training.use_peft and (
            self.peft.q_lora or any(self.model.model_kwargs.get(name) for name in _QUANTIZED)
        ):
            raise ConfigError("quantized weights cannot be trained: set training.use_peft, which trains adapters")

    def notes(self) -> list[str]:
        return [*self.model.notes(), *self.data.notes(), *self.training.notes(), *self.peft.notes(), *self.fsdp.notes()]
