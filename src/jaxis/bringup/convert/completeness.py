"""A check that a checkpoint is complete, before it is converted."""

from __future__ import annotations

from pathlib import Path

from jaxis.bringup.analyze.config import construct
from jaxis.bringup.analyze.tensors import check_tensors
from jaxis.errors import CheckpointError, ConfigError
from jaxis.layers.module import JaxModule
from jaxis.loading.checkpoint import Checkpoint
from jaxis.loading.orbax_checkpoint import OrbaxCheckpoint
from jaxis.models.tied_tables import config_as_stored


def check_complete(source: Path, checkpoint: Checkpoint | OrbaxCheckpoint) -> JaxModule:
    """Checks from names and shapes that the model takes every tensor and lacks none; returns the abstract model.

    Raises ConfigError if jaxis does not support the model, and CheckpointError if the model would not load.
    """
    tensors = {name: checkpoint.info(name) for name in checkpoint.names()}
    construction = construct(config_as_stored(source).to_dict(), str(source / "config.json"), tensors=tensors)
    if construction.model is None or construction.refusals:
        why = construction.refusals[0] if construction.refusals else "its architecture is not supported"
        raise ConfigError(f"{source} cannot be converted: {why}; jaxis analyze {source} says more")
    quant_config = None if construction.vllm_config is None else construction.vllm_config.quant_config
    problems = check_tensors(construction.model, tensors, quant_config)
    if problems:
        first = problems[0]
        raise CheckpointError(
            f"{source}: {first.kind}: {first.names}: {first.reason} (1 of {len(problems)} problems with its tensors; "
            f"jaxis analyze {source} lists them)"
        )
    return construction.model
