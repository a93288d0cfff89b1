"""Numbers of 1 to 8 bits in 32-bit words, densely, as GPTQ, compressed-tensors and MLX pack along either axis.

Number i takes bits [i * bits, (i + 1) * bits) of a little-endian stream, across the borders of words.
"""

from __future__ import annotations

import numpy as np

from jaxis.kernels.weights.code_planes import pack_bytes, resized, unpack_bytes

_WORD_BITS = 32


def num_words(count: int, bits: int) -> int:
    """Returns the words that hold `count` numbers; the last may be partly empty."""
    return -(-count * bits // _WORD_BITS)


def unpack_numbers(words: np.ndarray, bits: int, count: int, *, axis: int = -1) -> np.ndarray:
    """Reads the first `count` numbers of int32 or uint32 words along an axis, as uint8.

    There are `num_words(count, bits)` words.
    """
    return np.moveaxis(unpack_bytes(_bytes_of(np.moveaxis(words, axis, -1)), bits, count), -1, axis)


def pack_numbers(numbers: np.ndarray, bits: int, *, axis: int = -1) -> np.ndarray:
    """The inverse of `unpack_numbers`: uint8 numbers -> int32 words along the axis, the last filled up with zeros."""
    rows = np.moveaxis(numbers, axis, -1)
    stream = resized(pack_bytes(rows, bits), 4 * num_words(rows.shape[-1], bits))
    return np.ascontiguousarray(np.moveaxis(np.ascontiguousarray(stream).view("<i4"), -1, axis))


def nibble_pairs(words: np.ndarray, count: int) -> np.ndarray:
    """Words of 4-bit numbers along the last axis -> uint8 [..., count / 2], two a byte, without unpacking them."""
    return _bytes_of(words)[..., : count // 2]


def pack_nibble_pairs(pairs: np.ndarray) -> np.ndarray:
    """The inverse of `nibble_pairs`: uint8 [..., n] -> int32 words along the last axis."""
    return np.ascontiguousarray(resized(pairs, -(-pairs.shape[-1] // 4) * 4)).view("<i4")


def _bytes_of(words: np.ndarray) -> np.ndarray:
    """32-bit [..., n] -> uint8 [..., 4 n], the lowest bits first."""
    return np.ascontiguousarray(words).astype(words.dtype.newbyteorder("<"), copy=False).view(np.uint8)
