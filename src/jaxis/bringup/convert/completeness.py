"""A check that a checkpoint is complete, before it is converted."""

from __future__ import annotations

from pathlib import Path

from jaxis.bringup.analyze.construction import construct
from jaxis.bringup.analyze.tensors import check_tensors
from jaxis.errors import CheckpointError
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
    model, vllm_config = construction.checked(f"{source} cannot be converted")
    if findings := check_tensors(model, tensors, vllm_config.quant_config):
        raise CheckpointError(
            f"{source}: {findings[0]} (1 of {len(findings)} problems with its tensors; jaxis analyze {source} lists "
            "them)"
        )
    return model
