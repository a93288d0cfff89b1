"""Digests of arrays, of files beside them, and of the arithmetic that made them."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import ml_dtypes
import numpy as np

from jaxis.kernels import native, native_constants
from jaxis.kernels.host_threads import begin_each_part
from jaxis.kernels.weights import PackedWeight, WeightScheme, pack

_CHUNK_BYTES = 4 << 20
_NUM_CALLS = 16


def digests(arrays: Sequence[np.ndarray]) -> list[str]:
    """Returns a digest of each array of bytes, in parallel."""
    return begin_digests(arrays)()


def begin_digests(arrays: Sequence[np.ndarray]) -> Callable[[], list[str]]:
    """Begins to compute digests on other threads; returns a function that waits for them and returns them."""
    library = native.library()
    assert library is not None
    chunks = [(index, at) for index, array in enumerate(arrays) for at in range(0, array.size, _CHUNK_BYTES)]

    def digest(first: int, last: int) -> list[bytes]:
        # Threads hold the arrays, which nobody else may by then: an error elsewhere ends a start before they do.
        own = chunks[first:last]
        addresses = np.array([arrays[index].ctypes.data + at for index, at in own], np.uint64)
        sizes = np.array([min(_CHUNK_BYTES, arrays[index].size - at) for index, at in own], np.int64)
        found = np.empty(len(own), np.dtype("<u8"))
        library.jaxis_digests(addresses.ctypes.data, sizes.ctypes.data, found.size, found.ctypes.data)
        return [each.tobytes() for each in found]

    # Few calls: a thread that returns from one waits for the interpreter.
    parts = begin_each_part(digest, len(chunks), -(-len(chunks) // _NUM_CALLS) or 1)

    @functools.cache  # the results of the threads can be read once
    def finish() -> list[str]:
        of_arrays = [hashlib.sha256() for _ in arrays]
        of_chunks = (each for part in parts for each in part)
        for (index, _), each in zip(chunks, of_chunks, strict=True):
            of_arrays[index].update(each)
        return [each.hexdigest()[:16] for each in of_arrays]

    return finish


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
