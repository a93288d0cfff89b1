"""Optional rooms: packages and modules of jaxis that an installation may lack."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Mapping
from importlib import import_module
from types import ModuleType

from jaxis.errors import ConfigError


@functools.cache
def has_room(name: str) -> bool:
    """Returns whether this installation has a room, such as "lora" or "server.ollama"; its parents are imported."""
    try:
        spec = importlib.util.find_spec(f"jaxis.{name}")
    except ModuleNotFoundError:  # a parent is missing
        return False
    return spec is not None and spec.origin is not None  # a folder without sources has no origin


def check_room(name: str, wanted: str) -> None:
    """Raises ConfigError if this installation lacks a room, which is `wanted`, such as "--models"."""
    if not has_room(name):
        raise ConfigError(f"{wanted} needs jaxis.{name}, which is not part of this installation")


def check_options(name: str, options: Mapping[str, object]) -> None:
    """Raises ConfigError as `check_room` does if one of a room's options, given by their names, is set."""
    for option, value in options.items():
        if value:
            check_room(name, option)


def room_module(name: str, module: str, wanted: str) -> ModuleType:
    """Imports a module of a room, such as "adapter_memory" of "lora". Raises ConfigError as `check_room` does."""
    check_room(name, wanted)
    return import_module(f"jaxis.{name}.{module}")
