"""A checkpoint folder whose weights are an Orbax checkpoint, read as if they were safetensors files.

The folder has config.json, the tokenizer's files, `orbax_layout.json` (which tensor is where) and the Orbax checkpoint
itself under `params/`. A `params/` that Orbax or a training run has overwritten is read as well, if its arrays match
the layout. Source: https://orbax.readthedocs.io/en/latest/guides/checkpoint/orbax_checkpoint_101.html.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxis.errors import CheckpointError
from jaxis.host.closing import Closing
from jaxis.host.extras import check_extra
from jaxis.host.json_object import read_json_object
from jaxis.loading.safetensors import TensorInfo
from jaxis.loading.tensor_layout import ArraySpec, TensorLayout, layout_from_json

if TYPE_CHECKING:
    import tensorstore

LAYOUT_FILE = "orbax_layout.json"
PARAMS = "params"
LAYOUT_VERSION = 1
READ_BYTES = 64 << 20


class OrbaxCheckpoint(Closing):
    """The weights of a folder that `jaxis convert --to orbax` made. A context manager; see `Checkpoint`.

    Attributes:
      is_scanned: True if layers are stacked.
      total_bytes: Bytes of all tensors together.

    Raises:
      CheckpointError: On opening, if the layout or an array is missing, broken or contradicts the other.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        check_extra("orbax", f"the Orbax checkpoint {folder}")
        self.is_scanned, self._layout = _read_layout(self.folder / LAYOUT_FILE)
        self._params = self.folder / PARAMS
        self._format = _read_format(self._params)
        self._arrays: dict[tuple[str, ...], tensorstore.TensorStore] = {}
        self._infos: dict[str, TensorInfo] = {}
        for name, place in self._layout.places.items():
            spec = self._layout.arrays[place.path]
            shape = spec.shape[len(place.index) :]
            nbytes = int(np.prod(shape, dtype=np.int64)) * spec.dtype.itemsize
            self._infos[name] = TensorInfo(spec.dtype, shape, nbytes, offset=0)
        self.total_bytes = sum(info.nbytes for info in self._infos.values())

    def names(self) -> tuple[str, ...]:
        return tuple(self._infos)

    def info(self, name: str) -> TensorInfo:
        try:
            return self._infos[name]
        except KeyError:
            raise CheckpointError(f"{self.folder} has no tensor {name!r} in its weights") from None

    def tensor(self, name: str) -> np.ndarray:
        """Reads a tensor into memory. Raises CheckpointError if there is none of that name, or it cannot be read."""
        self.info(name)
        place = self._layout.places[name]
        try:
            return _read_whole(self._array(place.path)[place.index])
        except ValueError as error:
            raise CheckpointError(f"{self._params}: {'.'.join(place.path)} cannot be read: {error}") from None

    def iterate(self) -> Iterator[tuple[str, np.ndarray]]:
        """Yields every tensor once, one in memory at a time."""
        for name in self._infos:
            yield name, self.tensor(name)

    def close(self) -> None:
        self._arrays.clear()

    def __contains__(self, name: object) -> bool:
        return name in self._infos

    def _array(self, path: tuple[str, ...]) -> tensorstore.TensorStore:
        """Returns the open array, checked against the layout's shape and type."""
        if path not in self._arrays:
            self._arrays[path] = _open_array(self._params, self._format, path, self._layout.arrays[path])
        return self._arrays[path]


def is_orbax_checkpoint(folder: Path) -> bool:
    return (folder / LAYOUT_FILE).exists()


def write_layout(folder: Path, layout: TensorLayout, *, is_scanned: bool) -> None:
    content = {
        "version": LAYOUT_VERSION,
        "layout": "scanned" if is_scanned else "unscanned",
        "arrays": layout.to_json(),
    }
    (folder / LAYOUT_FILE).write_text(json.dumps(content) + "\n", encoding="utf-8")


def zarr_request(folder: Path, shape: Sequence[int], dtype: np.dtype, chunks: Sequence[int] | None) -> dict[str, Any]:
    """Returns tensorstore's request for an array as Orbax stores it without a database: a file for each chunk.

    `chunks` is the shape of a chunk; None for an array that is only read.
    """
    metadata: dict[str, Any] = {"shape": list(shape)}
    if chunks is not None:
        metadata |= {"chunks": list(chunks), "compressor": None, "dimension_separator": "."}
    return {
        "driver": "zarr",
        "kvstore": {"driver": "file", "path": f"{folder.absolute()}/"},
        "metadata": metadata,
        "dtype": dtype.name,
        # Otherwise a chunk of only zeros would not be written, and a missing one would not mean unfinished work.
        "store_data_equal_to_fill_value": True,
    }


def _read_layout(path: Path) -> tuple[bool, TensorLayout]:
    content = read_json_object(path)
    if content.get("version") != LAYOUT_VERSION or content.get("layout") not in ("scanned", "unscanned"):
        raise CheckpointError(
            f"{path} has version {content.get('version')!r} and layout {content.get('layout')!r}, expected "
            f"{LAYOUT_VERSION} and scanned or unscanned: convert the checkpoint again"
        )
    try:
        return content["layout"] == "scanned", layout_from_json(content["arrays"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{path} is broken ({error!r}): convert the checkpoint again") from None


def _read_format(params: Path) -> dict[str, Any]:
    """Returns Orbax's storage of the arrays: one key-value database or one folder each, and the zarr version."""
    metadata = params / "_METADATA"
    if not metadata.exists():
        raise CheckpointError(
            f"{params} is not a complete Orbax checkpoint (it has no _METADATA): convert or save it again"
        )
    content = read_json_object(metadata)
    return {
        "driver": "zarr3" if content.get("use_zarr3") else "zarr",
        "ocdbt": (params / "manifest.ocdbt").exists(),
    }


def _read_whole(array: tensorstore.TensorStore) -> np.ndarray:
    """Reads an array some rows at a time: tensorstore briefly holds a second copy of everything in a read."""
    whole = np.empty(array.shape, array.dtype.numpy_dtype)
    if whole.ndim == 0:
        return np.asarray(array.read().result())
    rows = max(1, READ_BYTES // max(1, whole[:1].nbytes))
    for start in range(0, len(whole), rows):
        part = slice(start, min(start + rows, len(whole)))
        whole[part] = array[part].read().result()
    return whole


def _open_array(
    params: Path, stored: dict[str, Any], path: tuple[str, ...], spec: ArraySpec
) -> tensorstore.TensorStore:
    import tensorstore

    name = ".".join(path)
    store: dict[str, Any] = {"driver": "file", "path": f"{params / name}/"}
    if stored["ocdbt"]:
        store = {"driver": "ocdbt", "base": f"file://{params.resolve()}/", "path": f"{name}/"}
    try:
        array = tensorstore.open({"driver": stored["driver"], "kvstore": store}, open=True, read=True).result()
    except ValueError as error:
        reason = str(error).splitlines()[0]
        raise CheckpointError(f"{params} has no readable array {name!r}, which {LAYOUT_FILE} names: {reason}") from None
    if array.shape != spec.shape or array.dtype.numpy_dtype != spec.dtype:
        raise CheckpointError(
            f"{params}: {name} is {array.dtype.numpy_dtype.name} {list(array.shape)}, but {LAYOUT_FILE} says "
            f"{spec.dtype.name} {list(spec.shape)}"
        )
    return array
