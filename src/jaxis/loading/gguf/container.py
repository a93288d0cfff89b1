"""A memory-mapped reader of the GGUF format: keys with values, and tensors of block types.

A file is a header (magic, version, two counts), the keys, the tensors' descriptions and, after padding to the
alignment, their data. All of it is checked when the file is opened, so a tensor that can be named can be read. The work
and memory of opening a broken or hostile file are bounded by its size and by MAX_HEADER_BYTES.
Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md and its reader, ggml's `gguf.cpp`.
"""

from __future__ import annotations

import math
import mmap
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from jaxis.errors import CheckpointError
from jaxis.host.closing import Closing
from jaxis.loading.gguf_block_types import BlockType, find_block_type
from jaxis.loading.git_lfs import check_not_lfs_pointer
from jaxis.loading.header_cache import kept_headers
from jaxis.loading.mapped_pages import drop_pages_of

MAX_HEADER_BYTES = 100_000_000
DEFAULT_ALIGNMENT = 32

_MAGIC = b"GGUF"
_MAX_DIMENSIONS = 4
_MIN_KEY_BYTES = 8 + 4 + 1  # an empty name, the type and the smallest value
_MIN_TENSOR_BYTES = 8 + 4 + 4 + 8  # an empty name, no dimensions, the type and the offset
_LITTLE_ENDIAN_VERSIONS = (2, 3)

# Ids of the types of values.
_BOOL, _STRING, _ARRAY = 7, 8, 9
_NUMBERS = {
    **{0: np.dtype("u1"), 1: np.dtype("i1"), 2: np.dtype("<u2"), 3: np.dtype("<i2"), 4: np.dtype("<u4")},
    **{5: np.dtype("<i4"), 6: np.dtype("<f4"), _BOOL: np.dtype("?")},
    **{10: np.dtype("<u8"), 11: np.dtype("<i8"), 12: np.dtype("<f8")},
}
_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True)
class GGUFTensor:
    """A tensor of the file.

    Attributes:
      block_type: Storage of its elements.
      shape: Shape in elements, the slowest axis first, as in NumPy (the file has the reverse).
      offset: Position of its first byte, from the start of the file.
    """

    name: str
    block_type: BlockType
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        return self.nbytes_of_blocks + self.block_type.trailer

    @property
    def nbytes_of_blocks(self) -> int:
        return math.prod(self.shape) // self.block_type.elements * self.block_type.nbytes


class GGUFFile(Closing):
    """One open GGUF file. A context manager.

    Attributes:
      metadata: Its keys; see `read_gguf_metadata`.
      tensors: Its tensors by name, in the order of their bytes in the file.

    Raises:
      CheckpointError: On opening, if the file cannot be read or breaks the format in any way.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        header = _read_header(self.path, with_tensors=True)
        self.metadata, self.tensors = header.metadata, header.tensors
        try:
            with self.path.open("rb") as file:
                self._map: mmap.mmap | None = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be read: {error.strerror or error}") from error

    def tensor(self, name: str) -> np.ndarray:
        """Returns a read-only view of the mapped file; of a quantized tensor, uint8 [..., bytes of a row].

        The view stays valid after `release` and after `close`. Raises CheckpointError if the file was closed.
        """
        tensor = self.tensors[name]
        if self._map is None:
            raise CheckpointError(f"{self.path} was closed before tensor {name!r} was read")
        dtype = np.dtype(np.uint8) if tensor.block_type.dtype is None else tensor.block_type.dtype
        return np.ndarray(tensor.block_type.stored_shape(tensor.shape), dtype, buffer=self._map, offset=tensor.offset)

    def scale(self, name: str) -> np.ndarray:
        """Returns the scale after the blocks of a tensor whose type has a trailer, float32 [1]."""
        tensor, number = self.tensors[name], np.dtype("<f4")
        if self._map is None:
            raise CheckpointError(f"{self.path} was closed before tensor {name!r} was read")
        return np.frombuffer(self._map, number, 1, tensor.offset + tensor.nbytes_of_blocks).copy()

    def release(self, view: np.ndarray) -> None:
        """Lets the operating system drop the pages of (a part of) a tensor; reading it again reads the file again."""
        if self._map is not None:
            drop_pages_of(view)

    def close(self) -> None:
        """Releases the map; the file is unmapped when the last array that views it is gone."""
        # Not mmap.close(): an ndarray refers to the map without locking its buffer, and would be left dangling.
        self._map = None


def read_gguf_metadata(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Reads the keys of a GGUF file, in its order. Raises CheckpointError if it cannot be read or breaks the format.

    Numbers, booleans and strings are Python's; an array of numbers is a NumPy array, one of strings a list. Strings
    that are not valid UTF-8 (some vocabularies have them) are decoded with `surrogateescape`.
    """
    return _read_header(Path(path), with_tensors=False).metadata


def shortest_float(number: float) -> float:
    """Returns the shortest number that is the same float32: a file has 0.95 as float32, and a config.json has 0.95."""
    return float(str(np.float32(number)))


@dataclass(frozen=True)
class _Header:
    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]


def _read_header(path: Path, *, with_tensors: bool) -> _Header:
    headers = kept_headers()
    try:
        with path.open("rb") as file:
            if headers is None:
                return _HeaderReader(path, file).read(with_tensors=with_tensors)
            status = os.fstat(file.fileno())
            key = (path, status.st_size, status.st_mtime_ns)
            if key not in headers:
                headers[key] = _HeaderReader(path, file).read(with_tensors=True)
            return headers[key]
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error


class _HeaderReader:
    def __init__(self, path: Path, file: BinaryIO) -> None:
        self._path = path
        self._file_bytes = os.fstat(file.fileno()).st_size
        prefix = file.read(24)
        self._check_prefix(prefix)
        self._num_tensors, self._num_keys = struct.unpack_from("<QQ", prefix, 8)
        # Counts that the file is too short for must not make us read on.
        if self._num_keys * _MIN_KEY_BYTES + self._num_tensors * _MIN_TENSOR_BYTES > self._file_bytes:
            raise self._truncated("the header")
        # Not read as a whole: where the header ends is only known after parsing it.
        self._buffer = mmap.mmap(file.fileno(), min(self._file_bytes, MAX_HEADER_BYTES), access=mmap.ACCESS_READ)
        self._position = 24
        self._where = "the header"

    def read(self, *, with_tensors: bool) -> _Header:
        metadata = dict(self._keys())
        tensors = self._tensors(metadata) if with_tensors else {}
        return _Header(metadata, tensors)

    def _keys(self) -> Iterator[tuple[str, Any]]:
        seen: set[str] = set()
        for i in range(self._num_keys):
            self._where = f"key {i + 1} of {self._num_keys}"
            key = self._string()
            if key in seen:
                raise self._fault(f"the key {key!r} occurs twice")
            seen.add(key)
            self._where = f"the key {key!r}"
            yield key, self._value(self._number("<u4"))

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            return self._array()
        if kind not in _NUMBERS:
            raise self._fault(f"{self._where} has a value of the unknown type {kind}")
        return self._take_numbers(_NUMBERS[kind], 1)[0].item()

    def _array(self) -> list[str] | np.ndarray:
        kind, count = self._number("<u4"), self._number("<u8")
        if kind == _STRING:
            if count * _LENGTH.size > self._left:
                raise self._truncated(self._where)
            return self._strings(count)
        if kind not in _NUMBERS:
            raise self._fault(f"{self._where} is an array of the type {kind}, which arrays cannot have")
        return self._take_numbers(_NUMBERS[kind], count)

    def _strings(self, count: int) -> list[str]:
        """Like `_string`, `count` times, quickly: a vocabulary has hundreds of thousands."""
        buffer, position, end = self._buffer, self._position, len(self._buffer)
        unpack, size = _LENGTH.unpack_from, _LENGTH.size
        strings = []
        for _ in range(count):
            start = position + size
            position = start + unpack(buffer, position)[0] if start <= end else end + 1
            if position > end:
                raise self._truncated(self._where)
            strings.append(buffer[start:position].decode("utf-8", "surrogateescape"))
        self._position = position
        return strings

    def _string(self) -> str:
        return self._take(self._number("<u8")).decode("utf-8", "surrogateescape")

    def _number(self, dtype: str) -> int:
        return int(self._take_numbers(np.dtype(dtype), 1)[0])

    def _take_numbers(self, dtype: np.dtype, count: int) -> np.ndarray:
        content = self._take(count * dtype.itemsize)
        # Any byte but 0 means true, and NumPy wants it to be 1.
        return np.frombuffer(content, np.uint8) != 0 if dtype == np.bool_ else np.frombuffer(content, dtype)

    def _take(self, size: int) -> bytes:
        if size > self._left:
            raise self._truncated(self._where)
        start = self._position
        self._position += size
        return self._buffer[start : self._position]

    @property
    def _left(self) -> int:
        return len(self._buffer) - self._position

    def _tensors(self, metadata: dict[str, Any]) -> dict[str, GGUFTensor]:
        infos = {}
        for i in range(self._num_tensors):
            self._where = f"the description of tensor {i + 1} of {self._num_tensors}"
            tensor = self._tensor()
            if tensor.name in infos:
                raise self._fault(f"the tensor {tensor.name!r} occurs twice")
            infos[tensor.name] = tensor
        alignment = self._alignment(metadata)
        data_start = -(-self._position // alignment) * alignment
        for name, tensor in infos.items():
            if tensor.offset % alignment:
                raise self._fault(f"tensor {name!r} starts at {tensor.offset}, not at a multiple of {alignment}")
            infos[name] = GGUFTensor(name, tensor.block_type, tensor.shape, data_start + tensor.offset)
        infos = dict(sorted(infos.items(), key=lambda item: item[1].offset))
        self._check_places(list(infos.values()), data_start)
        return infos

    def _tensor(self) -> GGUFTensor:
        """A tensor's description, with its offset from the start of the data."""
        name = self._string()
        self._where = f"the description of tensor {name!r}"
        num_dimensions = self._number("<u4")
        if num_dimensions > _MAX_DIMENSIONS:
            raise self._fault(f"tensor {name!r} has {num_dimensions} dimensions, more than {_MAX_DIMENSIONS}")
        shape = tuple(int(size) for size in self._take_numbers(np.dtype("<u8"), num_dimensions)[::-1])
        block_type = find_block_type(self._number("<u4"), f"{self._path}: tensor {name!r}")
        if 0 in shape or math.prod(shape) >= 2**60:  # so that every size fits in 63 bits
            raise self._fault(f"tensor {name!r} has the shape {list(shape)}")
        if (shape or (1,))[-1] % block_type.elements:
            raise self._fault(
                f"tensor {name!r} has rows of {(shape or (1,))[-1]} elements, which blocks of {block_type.elements} "
                f"({block_type.name}) do not divide"
            )
        return GGUFTensor(name, block_type, shape, self._number("<u8"))

    def _alignment(self, metadata: dict[str, Any]) -> int:
        alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if type(alignment) is not int or alignment <= 0 or alignment & (alignment - 1):
            raise self._fault(f"general.alignment is {alignment!r}, not a power of two")
        return alignment

    def _check_places(self, tensors: list[GGUFTensor], data_start: int) -> None:
        """Checks that tensors, in the order of their places, do not overlap and are all in the file."""
        end = data_start
        for tensor in tensors:
            if tensor.offset < end:
                raise self._fault(f"tensor {tensor.name!r} overlaps the one before it")
            end = tensor.offset + tensor.nbytes
        if end > self._file_bytes:
            raise CheckpointError(
                f"{self._path} is truncated: {end - self._file_bytes} of {end} bytes are missing; download it again"
            )

    def _check_prefix(self, prefix: bytes) -> None:
        check_not_lfs_pointer(self._path, prefix)
        if prefix[:4] in (b"lmgg", b"fmgg", b"tjgg", b"algg"):
            raise CheckpointError(f"{self._path} is from before GGUF (2023): use a newer file of the model")
        if prefix[:4] != _MAGIC:
            raise CheckpointError(f"{self._path} is not a GGUF file: it does not begin with {_MAGIC.decode()!r}")
        version = int.from_bytes(prefix[4:8], "little")
        if len(prefix) < 24:
            raise self._truncated("the header")
        if version & 0xFFFF == 0:
            raise CheckpointError(f"{self._path} is a big-endian GGUF file, which is not read: use a little-endian one")
        if version not in _LITTLE_ENDIAN_VERSIONS:
            raise CheckpointError(
                f"{self._path} has version {version} of GGUF; versions "
                f"{' and '.join(map(str, _LITTLE_ENDIAN_VERSIONS))} are read: use a newer file of the model"
            )

    def _fault(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self._path} is not a valid GGUF file: {what}; download it again")

    def _truncated(self, where: str) -> CheckpointError:
        if self._file_bytes > MAX_HEADER_BYTES:
            return self._fault(f"{where} is not within its first {MAX_HEADER_BYTES} bytes")
        return CheckpointError(f"{self._path} is truncated within {where}: download it again")
