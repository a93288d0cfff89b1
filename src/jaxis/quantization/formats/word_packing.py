"""Numbers of 1 to 8 bits in 32-bit words, densely: number i takes bits [i * bits, (i + 1) * bits) of a little-endian
stream, across the borders of words. GPTQ, compressed-tensors and MLX pack so, along either axis.
"""

from __future__ import annotations

import numpy as np

from jaxis.kernels.quantized_matmul.coded import LOW_BITS

_WORD_BITS = 32
# As many numbers as it has bits fill whole bytes.
_NUMBERS_PER_BLOCK = 8


def num_words(count: int, bits: int) -> int:
    """The words that hold `count` numbers; the last may be partly empty."""
    return -(-count * bits // _WORD_BITS)


def unpack_numbers(words: np.ndarray, bits: int, count: int, *, axis: int = -1) -> np.ndarray:
    """Reads the first `count` numbers along an axis.

    Args:
      words: int32 or uint32, with `num_words(count, bits)` words along the axis.
      bits: Bits of a number.
      count: How many numbers there are.
      axis: The packed axis.

    Returns:
      uint8, with `count` numbers along the axis.
    """
    return np.moveaxis(_unpack_bytes(_bytes_of(np.moveaxis(words, axis, -1)), bits, count), -1, axis)


def pack_numbers(numbers: np.ndarray, bits: int, *, axis: int = -1) -> np.ndarray:
    """The inverse of `unpack_numbers`: uint8 numbers -> int32 words along the axis, the last filled up with zeros."""
    rows = np.moveaxis(numbers, axis, -1)
    stream = _resized(_pack_bytes(rows, bits), 4 * num_words(rows.shape[-1], bits))
    return np.ascontiguousarray(np.moveaxis(np.ascontiguousarray(stream).view("<i4"), -1, axis))


def nibble_pairs(words: np.ndarray, count: int) -> np.ndarray:
    """Words of 4-bit numbers along the last axis -> uint8 [..., count / 2], two a byte, without unpacking them."""
    return _bytes_of(words)[..., : count // 2]


def pack_nibble_pairs(pairs: np.ndarray) -> np.ndarray:
    """The inverse of `nibble_pairs`: uint8 [..., n] -> int32 words along the last axis."""
    return np.ascontiguousarray(_resized(pairs, -(-pairs.shape[-1] // 4) * 4)).view("<i4")


def code_planes(numbers: np.ndarray, bits: int) -> dict[str, np.ndarray]:
    """uint8 numbers [..., in] of 2, 3, 4, 5, 6 or 8 bits -> the arrays `codes` and `high` of a CodedWeight.

    `in` must be a multiple of 8.
    """
    low = LOW_BITS[bits]
    if bits == low:
        return {"codes": _pack_bytes(numbers, bits)}
    return {"codes": _pack_bytes(numbers & ((1 << low) - 1), low), "high": _pack_bytes(numbers >> low, bits - low)}


def plane_numbers(codes: np.ndarray, high: np.ndarray | None, bits: int) -> np.ndarray:
    """The inverse of `code_planes`: uint8 numbers [..., in]."""
    low, count = LOW_BITS[bits], codes.shape[-1] * 8 // LOW_BITS[bits]
    numbers = _unpack_bytes(codes, low, count)
    return numbers if high is None else numbers | _unpack_bytes(high, bits - low, count) << low


def _unpack_bytes(stream: np.ndarray, bits: int, count: int) -> np.ndarray:
    """uint8 [..., bytes] -> the first `count` numbers, as uint8 [..., count]."""
    if bits == 8:
        return stream[..., :count]
    blocks = -(-count // _NUMBERS_PER_BLOCK)
    parts = _resized(stream, blocks * bits).reshape(*stream.shape[:-1], blocks, bits)
    numbers = np.empty((*stream.shape[:-1], blocks, _NUMBERS_PER_BLOCK), np.uint8)
    mask = (1 << bits) - 1
    for index in range(_NUMBERS_PER_BLOCK):
        byte, shift = divmod(index * bits, 8)
        bits_read = parts[..., byte] >> shift
        if shift + bits > 8:
            bits_read = bits_read | parts[..., byte + 1] << (8 - shift)
        numbers[..., index] = bits_read & mask
    return numbers.reshape(*stream.shape[:-1], -1)[..., :count]


def _pack_bytes(numbers: np.ndarray, bits: int) -> np.ndarray:
    """uint8 [..., count] -> uint8 [..., bytes] of whole blocks of eight numbers."""
    if bits == 8:
        return numbers
    blocks = -(-numbers.shape[-1] // _NUMBERS_PER_BLOCK)
    parts = _resized(numbers, blocks * _NUMBERS_PER_BLOCK).reshape(*numbers.shape[:-1], blocks, _NUMBERS_PER_BLOCK)
    stream = np.zeros((*parts.shape[:-1], bits), np.uint8)
    for index in range(_NUMBERS_PER_BLOCK):
        byte, shift = divmod(index * bits, 8)
        stream[..., byte] |= parts[..., index] << shift
        if shift + bits > 8:
            stream[..., byte + 1] |= parts[..., index] >> (8 - shift)
    return stream.reshape(*numbers.shape[:-1], -1)


def _bytes_of(words: np.ndarray) -> np.ndarray:
    """32-bit [..., n] -> uint8 [..., 4 n], the lowest bits first."""
    return np.ascontiguousarray(words).astype(words.dtype.newbyteorder("<"), copy=False).view(np.uint8)


def _resized(array: np.ndarray, size: int) -> np.ndarray:
    """The array with its last axis cut or filled up with zeros to this size."""
    missing = size - array.shape[-1]
    if missing <= 0:
        return array[..., :size]
    return np.concatenate([array, np.zeros((*array.shape[:-1], missing), array.dtype)], axis=-1)
