"""Numbers of 1 to 8 bits as bytes: number i takes bits [i * bits, (i + 1) * bits) of a little-endian stream."""

from __future__ import annotations

import numpy as np

LOW_BITS = {2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 8: 8}
"""Map from the bits of a code to the number of them in `codes` of a CodedWeight; the others are in `high`."""

_NUMBERS_PER_BLOCK = 8  # which fill whole bytes


def code_planes(numbers: np.ndarray, bits: int) -> dict[str, np.ndarray]:
    """Packs uint8 numbers [..., in] of 2, 3, 4, 5, 6 or 8 bits into the arrays `codes` and `high` of a CodedWeight.

    `in` must be a multiple of 8; with 4 bits, a multiple of 2.
    """
    low = LOW_BITS[bits]
    if bits == low:
        return {"codes": pack_bytes(numbers, bits)[..., : numbers.shape[-1] * bits // 8]}
    return {"codes": pack_bytes(numbers & ((1 << low) - 1), low), "high": pack_bytes(numbers >> low, bits - low)}


def plane_numbers(codes: np.ndarray, high: np.ndarray | None, bits: int) -> np.ndarray:
    """Inverts `code_planes`: returns uint8 numbers [..., in]."""
    low, count = LOW_BITS[bits], codes.shape[-1] * 8 // LOW_BITS[bits]
    numbers = unpack_bytes(codes, low, count)
    return numbers if high is None else numbers | unpack_bytes(high, bits - low, count) << low


def unpack_bytes(stream: np.ndarray, bits: int, count: int) -> np.ndarray:
    """Returns the first `count` numbers of uint8 [..., bytes], as uint8 [..., count]."""
    if bits == 8:
        return stream[..., :count]
    blocks = -(-count // _NUMBERS_PER_BLOCK)
    parts = resized(stream, blocks * bits).reshape(*stream.shape[:-1], blocks, bits)
    numbers = np.empty((*stream.shape[:-1], blocks, _NUMBERS_PER_BLOCK), np.uint8)
    mask = (1 << bits) - 1
    for index in range(_NUMBERS_PER_BLOCK):
        byte, shift = divmod(index * bits, 8)
        bits_read = parts[..., byte] >> shift
        if shift + bits > 8:
            bits_read = bits_read | parts[..., byte + 1] << (8 - shift)
        numbers[..., index] = bits_read & mask
    return numbers.reshape(*stream.shape[:-1], -1)[..., :count]


def pack_bytes(numbers: np.ndarray, bits: int) -> np.ndarray:
    """Packs uint8 [..., count] into uint8 [..., bytes], in whole blocks of eight numbers."""
    if bits == 8:
        return numbers
    blocks = -(-numbers.shape[-1] // _NUMBERS_PER_BLOCK)
    parts = resized(numbers, blocks * _NUMBERS_PER_BLOCK).reshape(*numbers.shape[:-1], blocks, _NUMBERS_PER_BLOCK)
    stream = np.zeros((*parts.shape[:-1], bits), np.uint8)
    for index in range(_NUMBERS_PER_BLOCK):
        byte, shift = divmod(index * bits, 8)
        stream[..., byte] |= parts[..., index] << shift
        if shift + bits > 8:
            stream[..., byte + 1] |= parts[..., index] >> (8 - shift)
    return stream.reshape(*numbers.shape[:-1], -1)


def resized(array: np.ndarray, size: int) -> np.ndarray:
    missing = size - array.shape[-1]
    if missing <= 0:
        return array[..., :size]
    return np.concatenate([array, np.zeros((*array.shape[:-1], missing), array.dtype)], axis=-1)
