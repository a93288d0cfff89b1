from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxis.errors import CheckpointError
from jaxis.host.closing import Closing
from jaxis.loading.gguf.container import GGUFFile, GGUFTensor
from jaxis.loading.gguf_files import find_shards


class GGUFModelFiles(Closing):
    """All GGUF files of a model, opened by the path of any of them. A context manager.

    Attributes:
      path: The first file.
      metadata: The model's keys, which are in the first file.
      tensors: The tensors of all files by name, in the order of their files and of their bytes in each.

    Raises:
      CheckpointError: On opening, if a file is missing or broken, contradicts another, or is not a language model.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        paths = find_shards(Path(path))
        self.path = paths[0]
        self._files: list[GGUFFile] = []
        self._file_of: dict[str, GGUFFile] = {}
        try:
            for each in paths:
                self._files.append(GGUFFile(each))
            for number, file in enumerate(self._files):
                self._check_place(file, number)
                self._add_tensors(file)
            self.metadata: Mapping[str, Any] = self._files[0].metadata
            self.tensors: Mapping[str, GGUFTensor] = {name: file.tensors[name] for name, file in self._file_of.items()}
            self._check_whole()
        except CheckpointError:
            self.close()
            raise

    def file_of(self, name: str) -> GGUFFile:
        return self._file_of[name]

    def close(self) -> None:
        for file in self._files:
            file.close()

    def _add_tensors(self, file: GGUFFile) -> None:
        for name in file.tensors:
            if name in self._file_of:
                raise CheckpointError(
                    f"{file.path}: tensor {name!r} is also in {self._file_of[name].path.name}: download both again"
                )
            self._file_of[name] = file

    def _check_place(self, file: GGUFFile, number: int) -> None:
        """Checks that a file is the shard that its name says."""
        count = len(self._files)
        stored = file.metadata.get("split.no", 0), file.metadata.get("split.count", 1) or 1
        if stored != (number, count):
            raise CheckpointError(
                f"{file.path} says that it is shard {stored[0] + 1} of {stored[1]}, not {number + 1} of {count}: "
                "give it back its original name"
            )

    def _check_whole(self) -> None:
        expected = self.metadata.get("split.tensors.count", len(self.tensors))
        if expected != len(self.tensors):
            raise CheckpointError(
                f"{self.path} and its other shards have {len(self.tensors)} tensors, but must have {expected}: "
                "download them again"
            )
        kind = self.metadata.get("general.type", "model")
        if kind != "model":
            hint = "give the file of the model itself"
            raise CheckpointError(f"{self.path} is not a language model but of the type {kind!r}: {hint}")
        architecture = self.metadata.get("general.architecture")
        if not isinstance(architecture, str):
            raise CheckpointError(f"{self.path} does not name its architecture: use another file of the model")
        if architecture == "clip":
            raise CheckpointError(f"{self.path} is the vision part of a model: give the file of the model itself")
