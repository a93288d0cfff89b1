"""Base of the sections of a training run's YAML file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from typing import ClassVar

from jaxis.errors import ConfigError
from jaxis.inference.parameter_group import ParameterGroup

TORCH_ONLY = "it arranges how PyTorch computes"


@dataclass(frozen=True, kw_only=True)
class ConfigSection(ParameterGroup):
    """A section of the file.

    Attributes:
      WITHOUT_EFFECT: Fields that change no result, with the reason.
      REFUSED: Fields that must keep their default value, with the advice to the user.
    """

    WITHOUT_EFFECT: ClassVar[Mapping[str, str]] = {}
    REFUSED: ClassVar[Mapping[str, str]] = {}

    def __post_init__(self) -> None:
        for name, why in self.REFUSED.items():
            if not self._is_default(name):
                self.refuse(name, why)

    def notes(self) -> list[str]:
        return [
            f"{self.section()}.{name} has no effect: {why}"
            for name, why in self.WITHOUT_EFFECT.items()
            if not self._is_default(name)
        ]

    def check_number(self, name: str, low: float, high: float = float("inf"), *, whole: bool = False) -> None:
        """Raises ConfigError if a field is not a number from `low` to `high`."""
        value = getattr(self, name)
        kinds = int if whole else (int, float)
        if isinstance(value, bool) or not isinstance(value, kinds) or not low <= value <= high:
            kind = "an integer" if whole else "a number"
            upper = f" to {high:g}" if high < float("inf") else ""
            raise ConfigError(f"{self.section()}.{name}={value!r} must be {kind} from {low:g}{upper}")

    def _is_default(self, name: str) -> bool:
        value = getattr(self, name)
        default = next(f for f in fields(self) if f.name == name)
        if default.default is not MISSING:
            return value == default.default or not value
        return not value
