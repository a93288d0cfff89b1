"""A training run as its YAML file describes it, under Oumi's names.

Each parameter is applied, or refused with the reason. Those of `unused.py` that change no result are accepted, and
`notes` names them. This file has the whole and the sections `model`, `peft` and `fsdp`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from jaxis.config.parameter_group import ParameterGroup, Unused, choice, number, refused, whole
from jaxis.engine.model_params import ModelParams
from jaxis.errors import ConfigError
from jaxis.training.config.data import DataParams, DatasetParams, SplitParams, ValidationParams
from jaxis.training.config.methods import DistillationParams, GrpoParams
from jaxis.training.config.training import DPO, SFT, ProfilerParams, ScheduleParams, TrainingParams
from jaxis.training.config.unused import FSDP, PEFT


@dataclass(frozen=True, kw_only=True)
class PeftParams(ParameterGroup):
    """Settings of trained adapters, for `training.use_peft`.

    Attributes:
      lora_r, lora_alpha, lora_dropout: Values of PEFT's r, lora_alpha and lora_dropout.
      lora_target_modules: Last parts of the names of linear layers; None or all-linear: all except the output head.
      lora_exclude_modules: Last parts of names to leave out.
      use_rslora: True for the scale alpha / sqrt(r) instead of alpha / r.
      q_lora: True to quantize the frozen weights to `q_lora_bits`: 4 or 8.
      peft_save_mode: adapter_only writes PEFT's files; merged writes the whole model.
    """

    lora_r: int = whole(8, 1, 4096)
    lora_alpha: float = number(8, 0)
    lora_dropout: float = number(0.0, 0, 0.999)
    lora_target_modules: Any = None
    lora_exclude_modules: Any = None
    use_rslora: bool = False
    q_lora: bool = False
    q_lora_bits: int = 4
    peft_save_mode: str = choice("adapter_only", ("adapter_only", "merged"))

    UNUSED: ClassVar[Mapping[str, Unused]] = PEFT

    @classmethod
    def section(cls) -> str:
        return "peft"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("lora_target_modules", "lora_exclude_modules"):
            value = getattr(self, name)
            names = [value] if isinstance(value, str) else [] if value is None else value
            if not isinstance(names, list | tuple) or not all(isinstance(each, str) for each in names):
                raise ConfigError(f"peft.{name}={value!r} must be a list of names such as q_proj")
            object.__setattr__(self, name, tuple(names))
        if self.q_lora_bits not in (4, 8):
            self.refuse("q_lora_bits", "4 or 8")
        if self.q_lora and self.peft_save_mode == "merged":
            self.refuse("peft_save_mode", "adapters of a quantized model are saved alone: adapter_only")

    @property
    def targets(self) -> tuple[str, ...] | None:
        """Last parts of layer names; None: all linear layers."""
        return None if self.lora_target_modules in ((), ("all-linear",)) else self.lora_target_modules


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

    UNUSED: ClassVar[Mapping[str, Unused]] = {
        **ModelParams.UNUSED,
        "freeze_layers": refused("all weights are trained, or with training.use_peft adapters alone"),
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.adapter_model is not None:
            self.refuse("adapter_model", "adapters are trained from their start; merge it into the model first")
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
      enable_fsdp: True to use all devices. `training.per_device_train_batch_size` applies to each device, or to each
        group of `tensor_parallel_size` devices.
      tensor_parallel_size: Number of devices that share each layer, and batch rows.
    """

    enable_fsdp: bool = False
    tensor_parallel_size: int = whole(1, 1)

    UNUSED: ClassVar[Mapping[str, Unused]] = FSDP

    @classmethod
    def section(cls) -> str:
        return "fsdp"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tensor_parallel_size > 1 and not self.enable_fsdp:
            self.refuse("tensor_parallel_size", "set fsdp.enable_fsdp, too")


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
        for group in (TrainedModelParams, DataParams, TrainingParams, PeftParams, FSDPParams):
            object.__setattr__(self, group.section(), group.of(getattr(self, group.section()) or {}))
        value = self.deepspeed
        if value is not None and not (isinstance(value, Mapping) and not value.get("enable_deepspeed", False)):
            self.refuse("deepspeed", "give fsdp")
        if self.training.eval_strategy != "no" and not self.data.validation.datasets:
            raise ConfigError("training.eval_strategy needs data.validation.datasets: name a file there")
        if not self.training.use_peft and (
            self.peft.q_lora or any(self.model.model_kwargs.get(name) for name in _QUANTIZED)
        ):
            raise ConfigError("quantized weights cannot be trained: set training.use_peft, which trains adapters")

        if self.data.train.stream:
            self._check_stream()

    def _check_stream(self) -> None:
        """Raises ConfigError if streamed rows cannot be honoured."""
        training = self.training
        if training.trainer_type not in (SFT, DPO):
            self.data.train.refuse("stream", f"training.trainer_type={training.trainer_type} reads all rows")
        if training.max_steps <= 0:
            self.data.train.refuse("stream", "set training.max_steps: nobody knows how many rows there are")
        if training.eval_strategy == "epoch":
            self.data.train.refuse("stream", "set training.eval_strategy to steps: nobody knows where an epoch ends")

    def notes(self) -> list[str]:
        return [*self.model.notes(), *self.data.notes(), *self.training.notes(), *self.peft.notes(), *self.fsdp.notes()]
