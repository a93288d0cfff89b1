"""The declaration of an argument, and of a group of arguments that belong to one feature."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from jaxis.engine.argument_groups.combinations import EngineFeature

ConfigClass = Literal["ModelConfig", "CacheConfig", "SchedulerConfig", "ParallelConfig", "LoadConfig"]


@dataclass(frozen=True)
class ArgumentInfo:
    """Metadata of an argument beyond its type and default.

    Attributes:
      description: Meaning of the argument, in sentences of Markdown; links are relative to `docs/`.
      documented_default: Text of the documentation for the default, in Markdown, if the value itself does not say it.
      config: Class of `jaxis.config` with an equal field of the same name, if the argument is passed on unchanged.
      minimum: Smallest value of an integer.
      help: One line for the command line; None if there is no option.
      metavar: Placeholder for the value in the help.
      option: Name of the option, if it differs from the argument's.
      short: Short name of the option, with its dash, as vLLM has it; None if there is none.
      panel: Group of options in the help.
      speed_only: True if the argument affects only speed, not answers.
      in_fingerprint: False if no answer to a greedy or seeded request depends on the argument.
      room: Room of jaxis that applies the argument and may not be installed; "" for none.
    """

    description: str
    documented_default: str | None = None
    config: ConfigClass | None = None
    minimum: int | None = None
    help: str | None = None
    metavar: str | None = None
    option: str | None = None
    short: str | None = None
    panel: str = "Engine"
    speed_only: bool = False
    in_fingerprint: bool = True
    room: str = ""


def argument(default: Any, **info: Any) -> Any:
    """Declares an argument as a field of a dataclass, with an `ArgumentInfo` of these attributes."""
    return field(default=default, metadata={"info": ArgumentInfo(**info)})


class ArgumentGroup:
    """Arguments of one feature, as a base class of `EngineArgs`."""

    def check(self) -> None:
        """Raises ConfigError if a value cannot be honoured whatever the model."""

    def features(self) -> Mapping[EngineFeature, tuple[bool, str]]:
        """Returns features that may not combine with others: whether each is asked for, and by which argument."""
        return {}
