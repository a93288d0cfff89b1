"""Options of `jaxis serve` for adapters that requests ask for by name."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.models import OptionInfo

from jaxis.errors import ConfigError

LORA_PANEL = "Adapters (LoRA)"
_MODULES = "--lora-modules"
_UPDATES_VARIABLE = "VLLM_ALLOW_RUNTIME_LORA_UPDATING"


def _lora(help: str, **settings: Any) -> OptionInfo:
    return typer.Option(help=help, rich_help_panel=LORA_PANEL, **settings)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoraOptions:
    """Adapters that are available, and the number of them that run at once; see docs/adapters.md."""

    enable_lora: Annotated[bool, _lora("Let requests ask for adapters.")] = False
    lora_modules: Annotated[
        list[str] | None,
        _lora("Adapters by name, such as a=DIR b=DIR, or as JSON.", metavar="NAME=DIR...", show_default=False),
    ] = None
    lora_root: Annotated[
        Path | None, _lora("Folder that adapters are in; nothing outside of it is loaded.", metavar="DIR")
    ] = None
    lora_updates: Annotated[bool, _lora("Let requests load and unload adapters in --lora-root.")] = False
    max_loras: Annotated[int, _lora("Adapters in a step; others wait.", min=1, metavar="NUMBER")] = 1
    max_lora_rank: Annotated[int, _lora("Largest rank of an adapter.", min=1, metavar="NUMBER")] = 16
    lora_target_modules: Annotated[
        str | None,
        _lora(
            "Layers with room for adapters, with commas (default: all-linear).",
            metavar="NAMES",
            show_default=False,
        ),
    ] = None
    max_cpu_loras: Annotated[int | None, _lora("Adapters in memory (default: no limit).", min=1, metavar="NUMBER")] = (
        None
    )

    @property
    def allows_updates(self) -> bool:
        """True if requests may load and unload adapters."""
        return self.lora_updates or (
            self.enable_lora and os.environ.get(_UPDATES_VARIABLE, "").lower() in ("1", "true")
        )

    def llm_arguments(self) -> dict[str, Any]:
        """Returns keyword arguments of `EngineArgs`. Raises ConfigError if the options contradict each other."""
        given = dataclasses.asdict(self)
        if not self.enable_lora:
            for name in ("lora_modules", "lora_root", "lora_updates", "lora_target_modules"):
                if given[name]:
                    raise ConfigError(f"--{name.replace('_', '-')} needs --enable-lora")
            return {}
        if self.allows_updates and self.lora_root is None:
            raise ConfigError(
                "requests may load adapters (--lora-updates): give --lora-root, the folder that they may load from"
            )
        del given["lora_updates"]
        root = None if self.lora_root is None else os.path.abspath(self.lora_root)
        given["lora_target_modules"] = self.lora_target_modules and self.lora_target_modules.split(",")
        return given | {"lora_modules": read_modules(self.lora_modules or ()), "lora_root": root}

    def check_none(self, because: str) -> None:
        """Raises ConfigError if adapters are asked for where none are possible."""
        if self.enable_lora or self.llm_arguments():
            raise ConfigError(f"--enable-lora {because}")


def spread_modules(args: Sequence[str]) -> list[str]:
    """Repeats `--lora-modules` before each adapter, where several follow one as in vLLM."""
    found: list[str] = []
    goes_on = False
    for i, arg in enumerate(args):
        if goes_on and i and ("=" in arg or arg.startswith(("{", "["))) and not arg.startswith("-"):
            if found[-1] != _MODULES:
                found.append(_MODULES)
            found.append(arg)
            continue
        goes_on = arg == _MODULES or arg.startswith(f"{_MODULES}=")
        found.append(arg)
    return found


def read_modules(given: Sequence[str]) -> dict[str, str]:
    """Maps names to folders of adapters from the command line: NAME=FOLDER, or JSON with name and path, as in vLLM.

    Raises ConfigError if an adapter is neither, or a name is given twice.
    """
    found: dict[str, str] = {}
    for text in given:
        for name, path in _pairs(text):
            if not name or not path:
                raise ConfigError(f"{_MODULES} {text!r}: an adapter needs a name and a folder, such as poet=./poet")
            if name in found:
                raise ConfigError(f"{_MODULES}: two adapters are called {name!r}: give one another name")
            found[name] = path
    return found


def _pairs(text: str) -> list[tuple[str, str]]:
    if not text.startswith(("{", "[")):
        name, _, path = text.partition("=")
        return [(name, path)]
    try:
        value = json.loads(text)
    except (json.JSONDecodeError, RecursionError):
        value = None
    entries = value if isinstance(value, list) else [value]
    pairs = []
    for entry in entries:
        keys = {"name", "path"}
        if not isinstance(entry, dict) or not keys <= set(entry) <= keys | {"base_model_name"}:
            raise ConfigError(f'{_MODULES} {text!r} is not like {{"name": "poet", "path": "./poet"}}')
        if not isinstance(entry["name"], str) or not isinstance(entry["path"], str):
            raise ConfigError(f"{_MODULES} {text!r}: name and path are strings")
        pairs.append((entry["name"], entry["path"]))
    return pairs
