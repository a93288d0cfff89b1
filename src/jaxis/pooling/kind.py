"""Purpose of a checkpoint: generating text, or vectors and scores. Imports no JAX."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from jaxis.config.architecture import architectures_of
from jaxis.config.hf_config import HFConfig
from jaxis.engine.arguments import EngineArgs
from jaxis.engine.client.engine_client import GENERATION, EngineKind
from jaxis.errors import ConfigError
from jaxis.loading.gguf_config_keys import POOLING_MODE
from jaxis.pooling.classifier_settings import is_classifier
from jaxis.pooling.encoders import is_encoder
from jaxis.pooling.pooling_config import has_pooling_files
from jaxis.pooling.pooling_info import POOLING

Runner = Literal["auto", "generate", "pooling"]


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
    """
    if runner == "auto":
        names = architectures_of(config)
        says_pooling = has_pooling_files(path) or config.get(POOLING_MODE) is not None
        return POOLING if says_pooling or is_encoder(names) or is_classifier(names, path) else GENERATION
    return POOLING if runner == "pooling" else GENERATION


def kind_of(args: EngineArgs, runner: Runner) -> EngineKind:
    """Returns the kind of an engine. Finds the checkpoint, on the Hub if necessary.

    Args:
      args: The engine's arguments.
      runner: Runner that the user asked for.

    Raises:
      ConfigError, CheckpointError: The checkpoint cannot be found or read.
    """
    from jaxis.loading.hub import resolve_model
    from jaxis.loading.open_checkpoint import read_config_values

    check_runner(runner)
    if runner != "auto" or args.model is None:
        return POOLING if runner == "pooling" else GENERATION
    path = resolve_model(args.model, revision=args.revision, token=args.token, cache_dir=args.cache_dir)
    config = read_config_values(path)
    return kind_of_checkpoint(path, HFConfig(config.values, args.hf_overrides or {}, source=config.source))
