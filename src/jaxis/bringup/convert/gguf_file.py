"""Writes a GGUF file tensor by tensor, with the `gguf` package."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

import numpy as np

from jaxis.errors import CheckpointError
from jaxis.host.extras import check_extra
from jaxis.loading.gguf.container import GGUFTensor
from jaxis.loading.gguf_block_types import BlockType

GGUFValue = (
    str | bool | int | float | Sequence[str] | Sequence[bytes] | Sequence[bool] | Sequence[int] | Sequence[float]
)

_CHUNK_ELEMENTS = 1 << 24  # converted at once


class GGUFFileWriter:
    """A GGUF file being written. A context manager; leaving it with an error removes the file.

    `keys` take their types from Python's: integers u32 and floats f32; empty values are left out. `tensors` are in the
    order of writing; rows of quantized ones are whole blocks. An existing file is replaced. Raises ConfigError if the
    `gguf` package is not installed.
    """

    def __init__(
        self, path: Path, architecture: str, keys: Mapping[str, GGUFValue], tensors: Mapping[str, GGUFTensor]
    ) -> None:
        check_extra("gguf", "writing a GGUF file")
        import gguf

        self._path = path
        self._missing = list(tensors.items())
        self._writer = gguf.GGUFWriter(path, architecture)
        for key, value in keys.items():
            if isinstance(value, str):
                self._writer.add_string(key, value)
            elif isinstance(value, bool):
                self._writer.add_bool(key, value)
            elif isinstance(value, int):
                self._writer.add_uint32(key, value)
            elif isinstance(value, float):
                self._writer.add_float32(key, value)
            else:
                self._writer.add_array(key, value)
        for name, tensor in tensors.items():
            raw = gguf.GGMLQuantizationType[tensor.block_type.name]
            self._writer.add_tensor_info(name, tensor.shape, np.dtype(np.float32), tensor.nbytes, raw_dtype=raw)

    def __enter__(self) -> GGUFFileWriter:
        self._writer.write_header_to_file()
        self._writer.write_kv_data_to_file()
        self._writer.write_ti_data_to_file()
        return self

    def write(self, name: str, tensor: np.ndarray) -> None:
        """Appends the next tensor, converted to its type.

        Raises ValueError if the tensor is not the expected one, and CheckpointError if a value is too large for
        float16.
        """
        expected, spec = self._missing.pop(0)
        if (name, tensor.shape) != (expected, spec.shape):
            raise ValueError(f"{name} {tensor.shape} was written where {expected} {spec} was expected")
        self._writer.write_tensor_data(_encode(tensor, spec, name))

    def __exit__(self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None) -> None:
        try:
            if kind is None:
                if self._missing:
                    raise ValueError(f"{self._missing[0][0]} was announced but never written")
                for file in self._writer.fout or ():
                    file.flush()
                    os.fsync(file.fileno())
        finally:
            self._writer.close()
            if kind is not None:
                self._path.unlink(missing_ok=True)


def _encode(tensor: np.ndarray, spec: GGUFTensor, name: str) -> np.ndarray:
    """Returns the tensor's bytes in the file, uint8."""
    tensor = np.ascontiguousarray(tensor)
    if tensor.dtype == spec.block_type.dtype:
        return tensor.reshape(-1).view(np.uint8)
    rows = tensor.reshape(-1, tensor.shape[-1])
    out = np.empty((len(rows), spec.nbytes // len(rows)), np.uint8)
    step = max(1, _CHUNK_ELEMENTS // rows.shape[1])
    for begin in range(0, len(rows), step):
        out[begin : begin + step] = _encode_rows(rows[begin : begin + step].astype(np.float32), spec.block_type, name)
    return out.reshape(-1)


def _encode_rows(rows: np.ndarray, block_type: BlockType, name: str) -> np.ndarray:
    if block_type.dtype is None:
        import gguf

        return gguf.quants.quantize(rows, gguf.GGMLQuantizationType[block_type.name])
    with np.errstate(over="ignore"):
        converted = rows.astype(block_type.dtype)
    if (np.isinf(converted) & np.isfinite(rows)).any():
        raise CheckpointError(
            f"{name} has a value of {np.abs(rows).max():g}, which {block_type.dtype} cannot hold: choose "
            "--outtype bf16 or f32"
        )
    return converted.view(np.uint8)
