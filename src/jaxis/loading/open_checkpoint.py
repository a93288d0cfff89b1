"""Opens the weights of a checkpoint folder, in whichever format they are."""

from __future__ import annotations

import os
from pathlib import Path

from jaxis.loading.checkpoint import Checkpoint
from jaxis.loading.orbax_checkpoint import OrbaxCheckpoint, is_orbax_checkpoint


def open_checkpoint(folder: str | os.PathLike[str]) -> Checkpoint | OrbaxCheckpoint:
    """Opens a folder's safetensors files, or its Orbax checkpoint. Raises CheckpointError as both do."""
    return OrbaxCheckpoint(folder) if is_orbax_checkpoint(Path(folder)) else Checkpoint(folder)
