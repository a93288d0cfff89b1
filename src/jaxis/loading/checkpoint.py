from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from jaxis.config.mistral_params import is_mistral_format
from jaxis.errors import CheckpointError
from jaxis.host.closing import Closing
from jaxis.host.json_object import read_json_object
from jaxis.loading.missing_weights import NOT_MODELS, explain_missing_weights
from jaxis.loading.mistral_names import MistralNames
from jaxis.loading.mlx_names import hugging_face_name, is_mlx
from jaxis.loading.safetensors import SafetensorsFile, TensorInfo

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_SHARD_NAME = re.compile(r"(.*)-(\d+)-of-(\d+)\.safetensors")


class Checkpoint(Closing):
    """A folder's safetensors weights, in one file or in shards, as one set of named tensors. A context manager.

    Reads the files that transformers would: `model.safetensors`; else the shards named in
    `model.safetensors.index.json`; else every `*.safetensors` file. Skips adapters, and Mistral's
    `consolidated*.safetensors`, which repeat the weights under other names. In a folder with only those and
    params.json, they are the weights: see `MistralNames`.

    Attributes:
      total_bytes: Bytes of all tensors together.
      metadata: The free-form metadata of all files together.

    Raises:
      CheckpointError: On opening, if there are no such weights or a file is missing, broken or contradicts another.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        if not self.folder.is_dir():
            raise CheckpointError(f"{self.folder} is not a folder: give the folder that holds config.json and weights")
        self._mistral_names = MistralNames.of_folder(self.folder) if is_mistral_format(self.folder) else None
        index = self._read_index()
        paths = [self.folder / _SINGLE] if index is None else sorted({self.folder / shard for shard in index.values()})
        if index is None and not paths[0].exists():
            paths = self._find_files()
        if missing := [path.name for path in paths if not path.exists()]:
            raise CheckpointError(
                f"{self.folder / _INDEX} names {len(missing)} of {len(paths)} shards that are missing "
                f"({missing[0]}{', ...' if len(missing) > 1 else ''}): download them again"
            )
        self._files: list[SafetensorsFile] = []
        self._place_of: dict[str, tuple[SafetensorsFile, str]] = {}  # name -> the file, and the name there
        self.metadata: dict[str, str] = {}
        try:
            for path in paths:
                self._add(SafetensorsFile(path))
            for name, shard in (index or {}).items():
                self._check_indexed(name, shard)
        except CheckpointError:
            self.close()
            raise
        self.total_bytes = sum(self.info(name).nbytes for name in self._place_of)

    def names(self) -> tuple[str, ...]:
        """Every tensor's name, in the order of `iterate`."""
        return tuple(self._place_of)

    def info(self, name: str) -> TensorInfo:
        """Returns a tensor's type, shape and place. Raises CheckpointError if there is none of that name."""
        file, stored_name = self._place(name)
        return file.info(stored_name)

    def tensor(self, name: str) -> np.ndarray:
        """Returns a read-only view of a tensor's mapped file, or a copy if the file has the rows in another order.

        Raises CheckpointError if there is none of that name.
        """
        return self._value(*self._place(name))

    def iterate(self) -> Iterator[tuple[str, np.ndarray]]:
        """Yields every tensor once, in the files' own order, so that reading is sequential.

        A tensor's pages are released two tensors later, so that the caller can still read one in the background while
        it takes the next: the process holds at most two mapped tensors. A view that the caller keeps stays valid.
        """
        previous: tuple[SafetensorsFile, str] | None = None
        for name, (file, stored_name) in self._place_of.items():
            yield name, self._value(file, stored_name)
            if previous is not None:
                previous[0].release(previous[1])
            previous = file, stored_name
        if previous is not None:
            previous[0].release(previous[1])

    def close(self) -> None:
        """Closes every file; arrays that still view one stay valid."""
        for file in self._files:
            file.close()

    def __contains__(self, name: object) -> bool:
        return name in self._place_of

    def _value(self, file: SafetensorsFile, stored_name: str) -> np.ndarray:
        tensor = file.tensor(stored_name)
        return tensor if self._mistral_names is None else self._mistral_names.value_here(stored_name, tensor)

    def _name_here(self, file: SafetensorsFile, stored_name: str) -> str | None:
        """Returns a tensor's name in Hugging Face's format; None leaves the tensor out."""
        if self._mistral_names is not None:
            return self._mistral_names.name_here(stored_name)
        return hugging_face_name(stored_name) if is_mlx(file.metadata) else stored_name

    def _place(self, name: str) -> tuple[SafetensorsFile, str]:
        try:
            return self._place_of[name]
        except KeyError:
            raise CheckpointError(f"{self.folder} has no tensor {name!r} in its weights") from None

    def _add(self, file: SafetensorsFile) -> None:
        self._files.append(file)
        self.metadata |= file.metadata
        for stored_name in file:
            name = self._name_here(file, stored_name)
            if name is None:
                continue
            if name in self._place_of:
                raise CheckpointError(
                    f"{self.folder}: tensor {name!r} is in both {self._place_of[name][0].path.name} and "
                    f"{file.path.name}: remove the file that does not belong"
                )
            self._place_of[name] = file, stored_name

    def _check_indexed(self, name: str, shard: str) -> None:
        if not any(file.path.name == shard and name in file for file in self._files):
            raise CheckpointError(
                f"{self.folder / _INDEX} places tensor {name!r} in {shard}, which does not hold it: "
                "download the checkpoint again"
            )

    def _read_index(self) -> dict[str, str] | None:
        """Returns tensor name -> shard's file name, or None if the index does not determine what is read."""
        path = self.folder / _INDEX
        if (self.folder / _SINGLE).exists() or not path.exists():
            return None
        weight_map = read_json_object(path).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{path} has no weight_map from tensor names to files: download it again")
        for name, shard in weight_map.items():
            # Shards must be in this folder: an index must not make us open files elsewhere.
            if not isinstance(shard, str) or Path(shard).name != shard:
                raise CheckpointError(f"{path} places tensor {name!r} in {shard!r}, which is not a file name")
        return weight_map

    def _find_files(self) -> list[Path]:
        """The folder's safetensors files, if neither of the standard names exists."""
        found = sorted(self.folder.glob("*.safetensors"))
        skipped = NOT_MODELS[1:] if self._mistral_names else NOT_MODELS
        paths = [path for path in found if not path.name.startswith(skipped)]
        if not paths:
            raise CheckpointError(explain_missing_weights(self.folder))
        for path in paths:
            if match := _SHARD_NAME.fullmatch(path.name):
                stem, number, count = match.groups()
                for i in range(1, int(count) + 1):
                    expected = f"{stem}-{i:0{len(number)}d}-of-{count}.safetensors"
                    if not (self.folder / expected).exists():
                        raise CheckpointError(f"{self.folder} has {path.name} but not {expected}: download it again")
        return paths
