"""The model that a checkpoint and an adapter make together, in any format."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from jaxis.bringup.convert.partial_folder import Conversion
from jaxis.errors import CheckpointError
from jaxis.loading.checkpoint_files import check_destination
from jaxis.loading.open_checkpoint import open_checkpoint
from jaxis.lora.merged_checkpoint import write_merged


@contextmanager
def merged_beside(source: Path, adapter: Path, destination: Path) -> Iterator[Path]:
    """Yields a temporary folder beside the destination with the merged model in Hugging Face format.

    Raises CheckpointError if the destination exists or cannot be written, and the errors of `write_merged`.
    """
    check_destination(destination)
    try:
        with tempfile.TemporaryDirectory(prefix=f".{destination.name}-", dir=destination.absolute().parent) as name:
            folder = Path(name) / destination.stem
            folder.mkdir()
            write_merged(source, adapter, folder)
            yield folder
    except OSError as error:
        raise CheckpointError(f"{destination} cannot be written: {error.strerror or error}") from error


def convert_merged(source: Path, adapter: Path, destination: Path) -> Conversion:
    """Writes the merged model in Hugging Face format; raises as `merged_beside` does."""
    with merged_beside(source, adapter, destination) as folder:
        with open_checkpoint(folder) as checkpoint:
            num_tensors, total_bytes = len(checkpoint.names()), checkpoint.total_bytes
        folder.rename(destination)
    return Conversion(num_tensors, total_bytes, 0, num_tensors)
