"""Settings of a server of several models: the models before they are loaded, and the memory for them."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxis.engine.memory_budget import MemoryBudget
from jaxis.errors import ConfigError, RequestError
from jaxis.server.config import ServerConfig
from jaxis.server.generation.served_model import ModelNames

# Share of the memory free at the start that all engines together may take; see `memory_plan`.
MEMORY_SHARE = 0.9
_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
_PART = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h)")


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """A model that can be loaded.

    Attributes:
      pinned: True if it is loaded at the start, and never unloaded for room or idleness.
      idle_seconds: Time that it stays loaded after its last request; infinity means forever.
    """

    config: ServerConfig
    engine_arguments: Mapping[str, Any] = field(default_factory=dict)
    pinned: bool = False
    idle_seconds: float = math.inf

    @property
    def names(self) -> ModelNames:
        return ModelNames(self.config.served_model_names, self.config.model_aliases)

    @property
    def name(self) -> str:
        return self.config.served_model_names[0]


@dataclass(frozen=True, kw_only=True)
class PoolLimits:
    """Limits on the models that are loaded at once.

    Attributes:
      free_bytes: Main memory that is free without any of them.
      most_loaded: Most models at once; None for no limit.
    """

    free_bytes: int
    most_loaded: int | None = None

    @property
    def budget_bytes(self) -> int:
        return int(self.free_bytes * MEMORY_SHARE)

    def budget(self, num_models: int) -> MemoryBudget:
        """Returns the memory budget of an engine: an equal share for each model that can be loaded at once."""
        at_once = min(num_models, self.most_loaded or num_models)
        return MemoryBudget(total_bytes=self.free_bytes, share_bytes=self.free_bytes // at_once)


def check_names(models: Sequence[ModelSettings]) -> None:
    """Raises ConfigError if two models have a name in common."""
    seen: dict[str, int] = {}
    for number, model in enumerate(models, 1):
        for name in dict.fromkeys(model.names.names):
            if name in seen:
                raise ConfigError(f"models {seen[name]} and {number} are both called {name!r}: give one another name")
            seen[name] = number


def parse_duration(value: str | float) -> float:
    """Returns seconds from a number, or a string such as "90s", "10m" or "1h30m"; infinity if negative.

    Raises:
      RequestError: The value is not a duration.
    """
    if not isinstance(value, str):
        return math.inf if value < 0 else float(value)
    text = value.strip()
    digits = text.removeprefix("-")
    if re.fullmatch(r"\d+(\.\d+)?", digits):
        seconds = float(digits)
    elif digits and not _PART.sub("", digits):
        seconds = sum(float(number) * _UNITS[unit] for number, unit in _PART.findall(digits))
    else:
        raise RequestError(
            f'={value[:40]!r} is no duration: send seconds, or a string such as "10m"', param="keep_alive"
        )
    return math.inf if text.startswith("-") else seconds
