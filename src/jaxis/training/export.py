"""Files of the finished model: a Hugging Face folder with all weights, or PEFT's files of adapters."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from jaxis.errors import CheckpointError
from jaxis.models.changed_checkpoint import ChangeTensor
from jaxis.training.checkpoint import sync
from jaxis.training.tensor_places import TensorPlaces

# Written last: without them a folder is no model and no adapter.
_LAST = ("config.json", "adapter_config.json")


@contextmanager
def placed_into(output: Path) -> Iterator[Path]:
    """A context whose temporary folder's files are moved to `output` once all of them are on the disk.

    Raises CheckpointError if a file cannot be written.
    """
    try:
        output.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".final-", dir=output) as name:
            folder = Path(name)
            yield folder
            names = sorted(folder.iterdir(), key=lambda path: path.name in _LAST)
            for path in names:
                if path.is_file():
                    sync(path)
            for path in names:
                if path.is_dir():
                    shutil.rmtree(output / path.name, ignore_errors=True)
                path.replace(output / path.name)
            sync(output)
    except OSError as error:
        raise CheckpointError(f"{output} cannot be written: {error.strerror or error}; free space, and go on") from None


def replaced_by(places: TensorPlaces, trained: Mapping[str, np.ndarray]) -> ChangeTensor:
    """Returns a function that replaces checkpoint tensors by trained weights, given by their names in jaxis."""

    def changed(name: str, tensor: np.ndarray) -> np.ndarray:
        value = places.tensor_of(name, trained)
        return tensor if value is None else value.astype(tensor.dtype)

    return changed
