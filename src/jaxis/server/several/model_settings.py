"""What a server of several models knows of each before it is loaded, and of their memory."""

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

# Of the memory that is free at the start, what the engines may take together; see `memory_plan`.
MEMORY_SHARE = 0.9
_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
_PART = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h)")


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """A model that can be loaded.

    Attributes:
      config: How it is served.
      engine_arguments: Those of `EngineArgs`.
      pinned: Loaded at the start, and never unloaded to make room or because it is idle.
      idle_seconds: How long it stays loaded after its last request; infinite is for good.
    """

    config: ServerConfig
    engine_arguments: Mapping[str, Any] = field(default_factory=dict)
    pinned: bool = False
    idle_seconds: float = math.inf

    @property
    def names(self) -> ModelNames:
        """Under which requests ask for it."""
        return ModelNames(self.config.served_model_names, self.config.model_aliases)

    @property
    def name(self) -> str:
        """The first of them."""
        return self.config.served_model_names[0]


@dataclass(frozen=True, kw_only=True)
class PoolLimits:
    """How many models may be loaded.

    Attributes:
      free_bytes: Main memory that is free without any of them.
      most_loaded: Most models at once; None is no limit.
    """

    free_bytes: int
    most_loaded: int | None = None

    @property
    def budget_bytes(self) -> int:
        """What the engines may take together."""
        return int(self.free_bytes * MEMORY_SHARE)

    def budget(self, num_models: int) -> MemoryBudget:
        """An engine's memory: an equal share for each of those that can be loaded at once."""
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
    """Seconds: a number, or a string such as "90s", "10m" or "1h30m"; a negative one is for good.

    Raises:
      RequestError: It is neither.
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
