"""The kind of engine that a user asked for, or that a checkpoint was made for. Imports no JAX."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from jaxis.config.hf_config import HFConfig
from jaxis.engine.arguments import EngineArgs
from jaxis.engine.client.engine_client import GENERATION, EngineKind
from jaxis.errors import ConfigError
from jaxis.rooms import has_room, room_module

Runner = Literal["auto", "generate", "pooling"]
_ROOM = "pooling"


def check_runner(runner: str) -> None:
    """Raises ConfigError if the runner is unknown."""
    if runner not in ("auto", "generate", "pooling"):
        raise ConfigError(f"runner={runner!r} must be auto, generate or pooling")


def kind_of_checkpoint(path: Path, config: HFConfig, runner: Runner = "auto") -> EngineKind:
    """Returns the kind of engine that was asked for, or that a checkpoint was made for.

    Args:
      path: Folder or file of the checkpoint.
      config: Its config.json.
      runner: Runner that the user asked for.

    Raises:
      ConfigError: The kind is not part of this installation.
    """
    if runner == "auto" and has_room(_ROOM) and room_module(_ROOM, "kind", "runner").is_made_for_pooling(path, config):
        runner = "pooling"
    return room_module(_ROOM, "pooling_info", "runner='pooling'").POOLING if runner == "pooling" else GENERATION


def kind_of(args: EngineArgs, runner: Runner) -> EngineKind:
    """Returns the kind of an engine. Finds the checkpoint, on the Hub if necessary.

    Args:
      args: The engine's arguments.
      runner: Runner that the user asked for.

    Raises:
      ConfigError, CheckpointError: The checkpoint cannot be found or read, or its kind is not installed.
    """
    from jaxis.loading.hub import resolve_model
    from jaxis.loading.open_checkpoint import read_config_values

    check_runner(runner)
    if runner == "auto" and args.model is None:
        runner = "generate"
    if runner != "auto":
        return kind_of_checkpoint(Path(), HFConfig({}), runner)
    path = resolve_model(str(args.model), revision=args.revision, token=args.token, cache_dir=args.cache_dir)
    config = read_config_values(path)
    return kind_of_checkpoint(path, HFConfig(config.values, args.hf_overrides or {}, source=config.source))
