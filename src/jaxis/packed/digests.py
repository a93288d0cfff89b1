"""Digests of arrays, of files beside them, and of the arithmetic that made them."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import ml_dtypes
import numpy as np

from jaxis.kernels import native, native_constants
from jaxis.kernels.host_threads import for_each_part
from jaxis.kernels.weights import PackedWeight, WeightScheme, pack

_CHUNK_BYTES = 4 << 20


def digests(arrays: Sequence[np.ndarray]) -> list[str]:
    """Returns a digest of each array of bytes, in parallel."""
    library = native.library()
    assert library is not None
    chunks = [(index, at) for index, array in enumerate(arrays) for at in range(0, array.size, _CHUNK_BYTES)]

    def digest(first: int, last: int) -> list[bytes]:
        parts = (arrays[index][at : at + _CHUNK_BYTES] for index, at in chunks[first:last])
        return [library.jaxis_digest(part.ctypes.data, part.size).to_bytes(8, "little") for part in parts]

    of_arrays = [hashlib.sha256() for _ in arrays]
    of_chunks = (each for part in for_each_part(digest, len(chunks), 4) for each in part)
    for (index, _), each in zip(chunks, of_chunks, strict=True):
        of_arrays[index].update(each)
    return [each.hexdigest()[:16] for each in of_arrays]


def file_digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def seal(description: str, sizes: Mapping[str, int]) -> str:
    """Returns a digest of a description of arrays, and of their places in the file: their sizes in its order."""
    return hashlib.sha256(json.dumps([description, *sizes.items()]).encode()).hexdigest()


@functools.cache
def arithmetic() -> str:
    """Returns a digest of the layout of panels, and of how weights are quantized: of what a small matrix becomes."""
    matrix = np.random.default_rng(0).standard_normal((48, 256), np.float32)
    digest = hashlib.sha256(json.dumps(native_constants.table(), sort_keys=True).encode())
    schemes = [None, WeightScheme("int8"), WeightScheme("int8", 32), WeightScheme("int4", 32)]
    for array, scheme in [(matrix.astype(ml_dtypes.bfloat16), None), *((matrix, scheme) for scheme in schemes)]:
        packed = pack(array, scheme=scheme)
        assert isinstance(packed, PackedWeight)
        digest.update(np.asarray(packed.data).tobytes())
    return digest.hexdigest()[:16]
