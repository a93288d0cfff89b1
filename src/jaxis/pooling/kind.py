"""Purpose of a checkpoint: generating text, or vectors and scores. Imports no JAX."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from jaxis.config.architecture import architectures_of
from jaxis.config.hf_config import HFConfig
from jaxis.engine.arguments import EngineArgs
from jaxis.errors import ConfigError
from jaxis.loading.gguf.encoder_config import POOLING_MODE
from jaxis.pooling.classifier_settings import is_classifier
from jaxis.pooling.encoders import is_encoder
from jaxis.pooling.pooling_config import has_pooling_files

Runner = Literal["auto", "generate", "pooling"]


def check_runner(runner: str) -> None:
    """Raises ConfigError if the runner is unknown."""
    if runner not in ("auto", "generate", "pooling"):
        raise ConfigError(f"runner={runner!r} must be auto, generate or pooling")


def is_made_for_pooling(path: Path, config: HFConfig) -> bool:
    """Returns whether a checkpoint, given by its path and config.json, was made for vectors or scores."""
    names = architectures_of(config)
    says_pooling = has_pooling_files(path) or config.get(POOLING_MODE) is not None
    return says_pooling or is_encoder(names) or is_classifier(names, path)


def pools(args: EngineArgs, runner: Runner) -> bool:
    """Returns whether an engine's model is to make vectors or scores. Finds the checkpoint, on the Hub if necessary.

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
        return runner == "pooling"
    path = resolve_model(args.model, revision=args.revision, token=args.token, cache_dir=args.cache_dir)
    config = read_config_values(path)
    return is_made_for_pooling(path, HFConfig(config.values, args.hf_overrides or {}, source=config.source))
