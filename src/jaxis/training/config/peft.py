"""The section `peft`: trained adapters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from jaxis.config.parameter_group import ParameterGroup, Unused, number, whole
from jaxis.errors import ConfigError
from jaxis.training.config.unused import PEFT


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
    peft_save_mode: str = "adapter_only"

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
        if self.peft_save_mode not in ("adapter_only", "merged"):
            self.refuse("peft_save_mode", "adapter_only or merged")
        if self.q_lora and self.peft_save_mode == "merged":
            self.refuse("peft_save_mode", "adapters of a quantized model are saved alone: adapter_only")

    @property
    def targets(self) -> tuple[str, ...] | None:
        """Last parts of layer names; None: all linear layers."""
        return None if self.lora_target_modules in ((), ("all-linear",)) else self.lora_target_modules
