from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from jaxis.errors import CheckpointError
from jaxis.layers.mapped_table import MappedTable
from jaxis.layers.module import JaxModule, named_modules, named_parameters
from jaxis.loading.packed_name import PACKED
from jaxis.loading.safetensors_writer import SafetensorsWriter, TensorHeader
from jaxis.packed.digests import arithmetic, digests, file_digest, seal
from jaxis.packed.values import describe
from jaxis.version import __version__

_PAGE = 4096


def write_packed(folder: Path, models: Mapping[str, JaxModule], dtype: str) -> int:
    """Writes loaded models, by the names of their classes, beside the other files of a folder; returns the bytes.

    Raises CheckpointError if a model has a table that stays in the checkpoint's files.
    """
    for model in models.values():
        for path, module in named_modules(model):
            if isinstance(module, MappedTable):
                raise CheckpointError(
                    f"{path} is a table that stays in its own files, and a packed folder has none: run the checkpoint"
                )
    arrays: dict[str, np.ndarray] = {}
    names: dict[tuple[int, int], str] = {}

    def add(array: np.ndarray) -> str:
        # Modules may share a parameter.
        name = names.setdefault((array.ctypes.data, array.nbytes), str(len(names)))
        arrays[name] = array
        return name

    parts = {
        of_class: {name: describe(param.get_value(), add) for name, param in named_parameters(model)}
        for of_class, model in models.items()
    }
    # Arrays of whole pages first, so that they begin with a page.
    arrays = dict(sorted(arrays.items(), key=lambda each: each[1].nbytes < _PAGE))
    specs = {name: TensorHeader(np.dtype(np.uint8), (_padded_size(array),)) for name, array in arrays.items()}
    description = {
        "version": __version__,
        "arithmetic": arithmetic(),
        "dtype": dtype,
        "files": {path.name: file_digest(path) for path in sorted(folder.iterdir()) if path.is_file()},
        "digests": {name: digests([_padded(array)])[0] for name, array in arrays.items()},
        "parts": parts,
    }
    text = json.dumps(description)
    sizes = {name: spec.nbytes for name, spec in specs.items()}
    metadata = {"format": "jaxis", "description": text, "seal": seal(text, sizes)}
    with SafetensorsWriter(folder / PACKED, specs, metadata, alignment=_PAGE) as writer:
        for name, array in arrays.items():
            writer.write(name, _padded(array))
    return sum(sizes.values())


def _padded_size(array: np.ndarray) -> int:
    """Returns an array's bytes with those up to the next page, or to the next cache line if it is small."""
    unit = 64 if array.nbytes < _PAGE else _PAGE
    return -(-array.nbytes // unit) * unit


def _padded(array: np.ndarray) -> np.ndarray:
    padded = np.zeros(_padded_size(array), np.uint8)
    padded[: array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return padded
