"""4-bit elements in 32-bit words, as compressed-tensors packs them: the earliest in the lowest bits."""

from __future__ import annotations

import numpy as np

VALUES_PER_WORD = 8


def pack_words(nibble_pairs: np.ndarray) -> np.ndarray:
    """uint8 [out, in / 2], two elements per byte, the first in the low bits -> int32 [out, ceil(in / 8)]."""
    missing = -nibble_pairs.shape[1] % (VALUES_PER_WORD // 2)
    return np.ascontiguousarray(np.pad(nibble_pairs, ((0, 0), (0, missing)))).view("<i4")


def unpack_words(words: np.ndarray, columns: int) -> np.ndarray:
    """The inverse of `pack_words`, for this number of columns."""
    return np.ascontiguousarray(words.astype("<i4", copy=False)).view(np.uint8)[:, : columns // 2]


def pack_rows(numbers: np.ndarray) -> np.ndarray:
    """uint8 [out, groups] of values 0 to 15 -> int32 [ceil(out / 8), groups], the first row in the lowest bits."""
    rows, groups = numbers.shape
    padded = np.pad(numbers, ((0, -rows % VALUES_PER_WORD), (0, 0))).astype(np.uint32)
    shifts = 4 * np.arange(VALUES_PER_WORD, dtype=np.uint32)[:, None]
    words = np.bitwise_or.reduce(padded.reshape(-1, VALUES_PER_WORD, groups) << shifts, axis=1)
    return words.astype("<u4").view("<i4")


def unpack_rows(words: np.ndarray, rows: int) -> np.ndarray:
    """The inverse of `pack_rows`, for this number of rows."""
    shifts = 4 * np.arange(VALUES_PER_WORD, dtype=np.int32)[:, None]
    return ((words[:, None] >> shifts) & 0xF).astype(np.uint8).reshape(-1, words.shape[1])[:rows]
