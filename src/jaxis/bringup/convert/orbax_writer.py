"""Writes an Orbax checkpoint tensor by tensor, and can resume an unfinished one.

Orbax itself saves a tree that is entirely in memory. Here it writes only the tree's description, over arrays of one
element; tensorstore then recreates each array in its real shape, piece by piece. Each piece is an uncompressed file
that appears only when it is complete, so existing pieces need not be written again.
"""

from __future__ import annotations

import itertools
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxis.errors import CheckpointError
from jaxis.host.extras import check_extra
from jaxis.loading.orbax_checkpoint import zarr_request
from jaxis.loading.tensor_layout import ArraySpec, TensorLayout

if TYPE_CHECKING:
    import tensorstore

PIECE_BYTES = 64 << 20  # held in memory at once, besides the mapped tensor


class OrbaxWriter:
    """Writes one Orbax checkpoint into a folder whose existing contents, if any, are from the same layout.

    Raises CheckpointError if a tensor has a type that Orbax does not support.
    """

    def __init__(self, folder: Path, layout: TensorLayout) -> None:
        check_extra("orbax", "writing an Orbax checkpoint")
        self._folder, self._layout = folder, layout
        self._num_stacked = {place.path: len(place.index) for place in layout.places.values()}
        self._open: tuple[tuple[str, ...], tensorstore.TensorStore] | None = None
        if not (folder / "_METADATA").exists():
            _write_description(folder, layout)

    def has(self, name: str) -> bool:
        """Returns whether the tensor has already been written."""
        place = self._layout.places[name]
        spec, piece = self._layout.arrays[place.path], self._piece_shape(place.path)
        size = math.prod(piece) * spec.dtype.itemsize  # the last ones are padded to the size of the others
        tensor_shape = spec.shape[len(place.index) :]
        counts = [-(-extent // step) for extent, step in zip(tensor_shape, piece, strict=True)]
        folder = self._folder / ".".join(place.path)
        files = (folder / (".".join(map(str, (*place.index, *i))) or "0") for i in np.ndindex(*counts))
        return all(file.is_file() and file.stat().st_size == size for file in files)

    def write(self, name: str, tensor: np.ndarray) -> None:
        place = self._layout.places[name]
        target = self._array(place.path)[place.index]
        for piece in _pieces(tensor.shape, self._piece_shape(place.path)):
            target[piece].write(tensor[piece]).result()

    def _piece_shape(self, path: tuple[str, ...]) -> tuple[int, ...]:
        spec = self._layout.arrays[path]
        return _piece_shape(spec.shape[self._num_stacked[path] :], spec.dtype.itemsize)

    def _array(self, path: tuple[str, ...]) -> tensorstore.TensorStore:
        if self._open is None or self._open[0] != path:
            chunks = [1] * self._num_stacked[path] + list(self._piece_shape(path))
            self._open = path, _open(self._folder / ".".join(path), self._layout.arrays[path], chunks)
        return self._open[1]


def _write_description(folder: Path, layout: TensorLayout) -> None:
    import orbax.checkpoint as ocp

    tree: dict[str, Any] = {}
    for path in layout.arrays:
        node = tree
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = np.zeros(1, np.int8)
    described = folder.with_name(f"{folder.name}.described")
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=False)) as checkpointer:
        checkpointer.save(described, tree, force=True)
    for path in layout.arrays:
        shutil.rmtree(described / ".".join(path))
    described.rename(folder)


def _open(folder: Path, spec: ArraySpec, chunks: list[int]) -> tensorstore.TensorStore:
    """Opens the array for writing; creates it unless it exists in its real shape."""
    import tensorstore

    request = zarr_request(folder, spec.shape, spec.dtype, chunks)
    try:
        return tensorstore.open(request, open=True).result()
    except ValueError:
        pass
    try:
        return tensorstore.open(request, create=True, delete_existing=True).result()
    except ValueError as error:
        raise CheckpointError(f"{folder} cannot be written: {str(error).splitlines()[0]}") from None


def _piece_shape(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """Returns the shape of a piece: as much of the last axes as PIECE_BYTES hold, at least 1 along each."""
    left, piece = PIECE_BYTES // itemsize, []
    for extent in reversed(shape):
        piece.append(max(1, min(extent, left)))
        left //= max(1, extent)
    return tuple(reversed(piece))


def _pieces(shape: tuple[int, ...], piece: tuple[int, ...]) -> Iterator[tuple[slice, ...]]:
    steps = [
        [slice(start, min(start + step, extent)) for start in range(0, extent, step)]
        for extent, step in zip(shape, piece, strict=True)
    ]
    return itertools.product(*steps)
