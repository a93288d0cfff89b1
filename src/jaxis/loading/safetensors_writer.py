"""A writer for the safetensors format that never holds more than one tensor.

Names, types and shapes are given first, for the header; the tensors follow one by one, in that order.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import numpy as np

from jaxis.loading.safetensors import DTYPES

_NAME_OF = {dtype: name for name, (dtype, _) in DTYPES.items()}


@dataclass(frozen=True)
class TensorHeader:
    dtype: np.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPES[_NAME_OF[self.dtype]][1] // 8


def write_tensors(path: Path, tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str] | None = None) -> None:
    """Writes tensors that are all in memory; for the arguments, see `SafetensorsWriter`."""
    specs = {name: TensorHeader(tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
    with SafetensorsWriter(path, specs, metadata) as writer:
        for name, tensor in tensors.items():
            writer.write(name, tensor)


class SafetensorsWriter:
    """A safetensors file being written. A context manager; leaving it checks that the file is complete.

    Args:
      path: The file, replaced if it exists.
      specs: Name -> type and shape of each tensor, in the order of writing.
      metadata: Additional entries of the header's free-form `__metadata__`.
      alignment: Bytes of which the place of the first tensor is a multiple.
    """

    def __init__(
        self,
        path: Path,
        specs: Mapping[str, TensorHeader],
        metadata: Mapping[str, str] | None = None,
        alignment: int = 8,
    ) -> None:
        header: dict[str, object] = {"__metadata__": {"format": "pt", **(metadata or {})}}  # transformers needs it
        end = 0
        for name, spec in specs.items():
            start, end = end, end + spec.nbytes
            header[name] = {
                "dtype": _NAME_OF[spec.dtype],
                "shape": list(spec.shape),
                "data_offsets": [start, end],
            }
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-(8 + len(text)) % alignment)
        self._missing = list(specs.items())
        self._file = path.open("wb")
        self._file.write(len(text).to_bytes(8, "little") + text)

    def write(self, name: str, tensor: np.ndarray) -> None:
        """Appends the next tensor. Raises ValueError if it is not the expected one."""
        expected, spec = self._missing.pop(0)
        if (name, tensor.dtype, tensor.shape) != (expected, spec.dtype, spec.shape):
            raise ValueError(f"{name} {tensor.dtype} {tensor.shape} was written where {expected} {spec} was expected")
        self._file.write(np.ascontiguousarray(tensor).reshape(-1).view(np.uint8).data)

    def __enter__(self) -> SafetensorsWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None) -> None:
        try:
            if kind is None:
                if self._missing:
                    raise ValueError(f"{self._missing[0][0]} was announced but never written")
                self._file.flush()
                os.fsync(self._file.fileno())
        finally:
            self._file.close()
