"""A memory-mapped reader of the safetensors format.

A file is an 8-byte little-endian header length, a JSON header `{name: {dtype, shape, data_offsets}}`, and one buffer
that the tensors cover without holes or overlaps. All of it is checked when the file is opened, so a tensor that can
be named can be read. Source: https://github.com/huggingface/safetensors (section "Format").
"""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeGuard

import ml_dtypes
import numpy as np

from jaxis.errors import CheckpointError
from jaxis.host.closing import Closing
from jaxis.host.json_object import parse_json_object
from jaxis.loading.git_lfs import check_not_lfs_pointer
from jaxis.loading.mapped_pages import drop_pages

MAX_HEADER_BYTES = 100_000_000
_MAX_DIMENSIONS = 64  # numpy's limit
_MAX_ELEMENTS = 2**59  # of at most 8 bytes, so that every byte count fits in 63 bits

# Element type in the format -> (numpy type, bits per element in the file). Also used by the writer.
DTYPES: dict[str, tuple[np.dtype, int]] = {
    "BOOL": (np.dtype(np.bool_), 8),
    "U8": (np.dtype("u1"), 8),
    "I8": (np.dtype("i1"), 8),
    "U16": (np.dtype("<u2"), 16),
    "I16": (np.dtype("<i2"), 16),
    "U32": (np.dtype("<u4"), 32),
    "I32": (np.dtype("<i4"), 32),
    "U64": (np.dtype("<u8"), 64),
    "I64": (np.dtype("<i8"), 64),
    "F16": (np.dtype("<f2"), 16),
    "BF16": (np.dtype(ml_dtypes.bfloat16), 16),
    "F32": (np.dtype("<f4"), 32),
    "F64": (np.dtype("<f8"), 64),
    "C64": (np.dtype("<c8"), 64),
    "F8_E4M3": (np.dtype(ml_dtypes.float8_e4m3fn), 8),
    "F8_E5M2": (np.dtype(ml_dtypes.float8_e5m2), 8),
    "F8_E4M3FNUZ": (np.dtype(ml_dtypes.float8_e4m3fnuz), 8),
    "F8_E5M2FNUZ": (np.dtype(ml_dtypes.float8_e5m2fnuz), 8),
    "F8_E8M0": (np.dtype(ml_dtypes.float8_e8m0fnu), 8),
    "F4": (np.dtype(ml_dtypes.float4_e2m1fn), 4),
}


@dataclass(frozen=True)
class TensorInfo:
    """Place and type of a tensor; `offset` is the position of its first byte, from the start of the file."""

    dtype: np.dtype
    shape: tuple[int, ...]
    nbytes: int
    offset: int


class TensorInfos(dict[str, TensorInfo]):
    """Name -> info of a checkpoint's tensors, and the free-form metadata of its files."""

    def __init__(self, infos: Mapping[str, TensorInfo], metadata: Mapping[str, str]) -> None:
        super().__init__(infos)
        self.metadata = dict(metadata)


class SafetensorsFile(Closing):
    """One open safetensors file, with the header's free-form `__metadata__`, if any. A context manager.

    Raises CheckpointError on opening, if the file cannot be read or breaks the format in any way.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        try:
            with self.path.open("rb") as file:
                file_bytes = os.fstat(file.fileno()).st_size
                header, data_start = self._read_header(file.read(8), file, file_bytes)
                self.metadata: dict[str, str] = self._pop_metadata(header)
                self._infos = self._check_layout(header, data_start, file_bytes)
                self._map: mmap.mmap | None = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be read: {error.strerror or error}") from error

    @property
    def names(self) -> tuple[str, ...]:
        """The tensors' names, in the order of their bytes in the file."""
        return tuple(self._infos)

    def info(self, name: str) -> TensorInfo:
        """Returns a tensor's type, shape and place. Raises CheckpointError if the file has none of that name."""
        try:
            return self._infos[name]
        except KeyError:
            raise CheckpointError(f"{self.path} has no tensor {name!r}") from None

    def tensor(self, name: str) -> np.ndarray:
        """Returns a read-only view of the mapped file (a copy for F4, which the file packs two to a byte).

        The view stays valid after `release` and after `close`. Raises CheckpointError if the file has no tensor of that
        name, or was closed.
        """
        info = self.info(name)
        if self._map is None:
            raise CheckpointError(f"{self.path} was closed before tensor {name!r} was read")
        if info.dtype == ml_dtypes.float4_e2m1fn:
            packed = np.frombuffer(self._map, np.uint8, count=info.nbytes, offset=info.offset)
            # The first of two elements is in the byte's low four bits.
            return np.stack([packed & 0xF, packed >> 4], axis=-1).reshape(info.shape).view(info.dtype)
        if info.nbytes == 0:
            return np.empty(info.shape, info.dtype)
        return np.ndarray(info.shape, info.dtype, buffer=self._map, offset=info.offset)

    def release(self, name: str) -> None:
        """Lets the operating system drop a tensor's pages from this process; reading it again reads the file again."""
        info = self.info(name)
        if self._map is not None:
            drop_pages(self._map, info.offset, info.offset + info.nbytes)

    def close(self) -> None:
        """Releases the map; the file is unmapped when the last array that views it is gone."""
        # Not mmap.close(): an ndarray refers to the map without locking its buffer, and would be left dangling.
        self._map = None

    def __iter__(self) -> Iterator[str]:
        return iter(self._infos)

    def __contains__(self, name: object) -> bool:
        return name in self._infos

    def _fault(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self.path} is not a valid safetensors file: {what}; download or convert it again")

    def _truncated(self, missing_bytes: int, file_bytes: int, where: str) -> CheckpointError:
        return CheckpointError(
            f"{self.path} is truncated: {missing_bytes} of {file_bytes + missing_bytes} bytes are missing "
            f"(within {where}); download it again"
        )

    def _read_header(self, prefix: bytes, file: BinaryIO, file_bytes: int) -> tuple[dict[str, Any], int]:
        """Returns the parsed header and the offset of the tensors' buffer."""
        if len(prefix) < 8:
            raise self._fault(f"it has {len(prefix)} bytes, fewer than the 8 of the header's length")
        check_not_lfs_pointer(self.path, prefix)
        header_bytes = int.from_bytes(prefix, "little")
        if header_bytes > MAX_HEADER_BYTES:
            raise self._fault(f"its header claims {header_bytes} bytes, more than the {MAX_HEADER_BYTES} allowed")
        data_start = 8 + header_bytes
        if data_start > file_bytes:
            raise self._truncated(data_start - file_bytes, file_bytes, "the header")
        text = file.read(header_bytes)
        if not text.startswith(b"{"):
            raise self._fault("its header does not start with '{'")
        return parse_json_object(text, f"The header of {self.path}"), data_start

    def _pop_metadata(self, header: dict[str, Any]) -> dict[str, str]:
        metadata = header.pop("__metadata__", None) or {}
        if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
            raise self._fault("its __metadata__ is not a map from strings to strings")
        return metadata

    def _check_layout(self, header: dict[str, Any], data_start: int, file_bytes: int) -> dict[str, TensorInfo]:
        """Checks every entry, and that together they cover the buffer exactly; returns them in file order."""
        infos = {name: self._check_entry(name, entry, data_start) for name, entry in header.items()}
        infos = dict(sorted(infos.items(), key=lambda item: (item[1].offset, item[1].nbytes)))
        end = data_start
        for name, info in infos.items():
            if info.offset != end:
                relation = "overlaps the one before it" if info.offset < end else "leaves a hole before it"
                raise self._fault(f"tensor {name!r} starts at byte {info.offset}, expected {end}: it {relation}")
            end += info.nbytes
            if end > file_bytes:
                total_bytes = max(info.offset + info.nbytes for info in infos.values())
                raise self._truncated(total_bytes - file_bytes, file_bytes, f"tensor {name!r}")
        if end != file_bytes:
            raise self._fault(f"{file_bytes - end} bytes after byte {end} belong to no tensor")
        return infos

    def _check_entry(self, name: str, entry: object, data_start: int) -> TensorInfo:
        if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
            raise self._fault(f"tensor {name!r} lacks one of dtype, shape and data_offsets")
        dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
        if not isinstance(dtype, str) or dtype not in DTYPES:
            raise CheckpointError(
                f"{self.path}: tensor {name!r} has the unknown dtype {dtype!r}; "
                f"convert it to one of {', '.join(sorted(DTYPES))}"
            )
        if not _is_sizes(shape):
            raise self._fault(f"tensor {name!r} has the shape {shape!r}, expected a list of non-negative integers")
        if not _is_sizes(offsets) or len(offsets) != 2:
            raise self._fault(f"tensor {name!r} has the data_offsets {offsets!r}, expected [begin, end]")
        # A size of 0 passes the check against the file's length whatever the others, but numpy limits them.
        if len(shape) > _MAX_DIMENSIONS or math.prod(size or 1 for size in shape) >= _MAX_ELEMENTS:
            raise self._fault(f"tensor {name!r} has a shape of {len(shape)} dimensions too large to address")
        begin, end = offsets
        numpy_dtype, element_bits = DTYPES[dtype]
        if 8 * (end - begin) != math.prod(shape) * element_bits:
            raise self._fault(
                f"tensor {name!r} of {dtype} {shape} takes {math.prod(shape) * element_bits / 8:.16g} bytes, "
                f"but its data_offsets {offsets} span {end - begin}"
            )
        return TensorInfo(numpy_dtype, tuple(shape), end - begin, data_start + begin)


def _is_sizes(value: object) -> TypeGuard[list[int]]:
    # type(), because True is an int too.
    return isinstance(value, list) and all(type(size) is int and size >= 0 for size in value)
