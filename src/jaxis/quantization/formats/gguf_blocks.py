"""The blocks of GGUF tensors, as one table: where in a block each field of a weight is.

A field is a function of blocks, uint8 [R, B, bytes] of R rows with B blocks each, that returns an array [R, ...].
Blocks are of numpy, or of JAX in a program that reads rows of a table.
Source: ggml's `ggml-common.h` and `ggml-quants.c`.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np

Arrays = dict[str, Any]
Field = Callable[[Any], Any]

# What the codes of the non-linear 4-bit types mean, and those of e2m1 floats.
IQ4_LEVELS = tuple(float(x) for x in (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113))
_E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1_LEVELS = (*_E2M1_MAGNITUDES, *(-x for x in _E2M1_MAGNITUDES))


@dataclass(frozen=True)
class BlockLayout:
    """Conversion of a type of blocks to a weight.

    Attributes:
      fields: Fields of the weight: a QuantizedWeight has a `qvalue`, a BlockScaledWeight a `value`, a CodedWeight
        `codes`, a ternary weight `numbers`. Each function takes the blocks of some rows.
      bits, offset, levels: Fields of a CodedWeight.
    """

    fields: Mapping[str, Field]
    bits: int = 0
    offset: int = 0
    levels: tuple[float, ...] | None = None

    def take_apart(self, blocks: np.ndarray) -> Arrays:
        return {name: field(blocks) for name, field in self.fields.items()}


def _viewed(array: Any, dtype: Any) -> Any:
    """Returns the bytes of the last axis as elements of another type."""
    return (np.ascontiguousarray(array) if isinstance(array, np.ndarray) else array).view(np.dtype(dtype))


def _concatenated(arrays: Sequence[Any]) -> Any:
    return arrays[0].__array_namespace__().concatenate(arrays, axis=-1)


def _nibble_pairs(runs: np.ndarray) -> np.ndarray:
    """4-bit codes, neighbours in a byte: uint8 [..., runs, n] -> uint8 [..., runs, n].

    In the file, the low nibbles of a run's n bytes are its first n codes, and the high ones the other n.
    """
    two = _viewed(runs, "<u2")
    first = (two & 0xF) | ((two >> 4) & 0xF0)
    second = ((two >> 4) & 0xF) | ((two >> 8) & 0xF0)
    return _concatenated([first.astype(np.uint8), second.astype(np.uint8)])


def _two_bit_codes(runs: np.ndarray) -> np.ndarray:
    """Four 2-bit codes a byte: uint8 [..., runs, n] -> [..., runs, n], n a multiple of 4.

    The file has n codes in bits 0 and 1, and so on.
    """
    words = _viewed(runs, "<u4")
    codes = []
    for shift in (0, 2, 4, 6):
        each = (words >> shift) & 0x03030303
        codes.append(((each | (each >> 6) | (each >> 12) | (each >> 18)) & 0xFF).astype(np.uint8))
    return _concatenated(codes)


def _bit_plane(runs: np.ndarray) -> np.ndarray:
    """Eight 1-bit codes a byte: uint8 [..., 32] -> [..., 32]; in the file, bit i of byte j belongs to code 32 i + j."""
    of = np if isinstance(runs, np.ndarray) else jnp
    bits = of.unpackbits(runs, axis=-1, bitorder="little").reshape(*runs.shape, 8)
    return of.packbits(bits.swapaxes(-1, -2), axis=-1, bitorder="little").reshape(runs.shape)


def _rows(array: np.ndarray) -> np.ndarray:
    return array.reshape(len(array), -1)


def _runs(blocks: np.ndarray, first: int, end: int, size: int) -> np.ndarray:
    """Bytes `first` to `end` of each block, in runs of `size`: [R, B, runs, size]."""
    return blocks[..., first:end].reshape(*blocks.shape[:2], -1, size)


def _float16(first: int, *, is_negated: bool = False) -> Field:
    """The float16 at this byte of each block: [R, B]."""

    def take(blocks: np.ndarray) -> np.ndarray:
        floats = _viewed(blocks[..., first : first + 2], "<f2")[..., 0]
        return -floats if is_negated else floats

    return take


def _bytes(first: int, end: int) -> Field:
    return lambda blocks: _rows(blocks[..., first:end])


def _nibbles(first: int, end: int, run: int) -> Field:
    return lambda blocks: _rows(_nibble_pairs(_runs(blocks, first, end, run)))


def _pairs_of_bits(first: int, end: int) -> Field:
    return lambda blocks: _rows(_two_bit_codes(_runs(blocks, first, end, 32)))


def _bits(first: int, end: int) -> Field:
    return lambda blocks: _rows(_bit_plane(blocks[..., first:end]))


def _k_scale(blocks: np.ndarray) -> np.ndarray:
    """The scales, of 6 bits, in bytes 4 to 16 of a block: uint8 [R, 8 B]."""
    a, c = blocks[..., 4:8], blocks[..., 12:16]
    return _rows(_concatenated([a & 63, (c & 15) | ((a >> 6) << 4)]))


def _k_minimum(blocks: np.ndarray) -> np.ndarray:
    b, c = blocks[..., 8:12], blocks[..., 12:16]
    return _rows(_concatenated([b & 63, (c >> 4) | ((b >> 6) << 4)]))


def _q3_k_scale(blocks: np.ndarray) -> np.ndarray:
    packed = blocks[..., 96:108]
    low = _concatenated([packed[..., :8] & 0xF, packed[..., :8] >> 4])
    high = _concatenated([(packed[..., 8:] >> shift) & 3 for shift in (0, 2, 4, 6)])
    return _rows((low | (high << 4)).view(np.int8) - np.int8(32))


def _iq4_xs_scale(blocks: np.ndarray) -> np.ndarray:
    high = _viewed(blocks[..., 2:4], "<u2")
    high = ((high >> np.arange(0, 16, 2, dtype=np.uint16)) & 3).astype(np.uint8)
    low = (blocks[..., 4:8, None] >> np.array([0, 4], np.uint8)).reshape(high.shape) & 0xF
    return _rows((low | (high << 4)).view(np.int8) - np.int8(32))


def _tq1_0_codes(blocks: np.ndarray) -> np.ndarray:
    """Five numbers of base 3 a byte, or four, as fractions of 256: first digits of 32 bytes, then second ones."""
    runs = ((0, 32, 5), (32, 48, 5), (48, 52, 4))
    digits = []
    for first, end, count in runs:
        for i in range(count):
            # The wrap of a byte drops the digits before.
            fraction = blocks[..., first:end] * np.uint8(3**i)
            digits.append((fraction.astype(np.uint16) * 3 >> 8).astype(np.uint8))
    of_bytes = _concatenated(digits).reshape(*blocks.shape[:-1], -1, 4)
    return _rows(functools.reduce(operator.or_, (of_bytes[..., i] << 2 * i for i in range(4))))


def _i2_s_numbers(blocks: np.ndarray) -> np.ndarray:
    """One number more than the weight's: uint8 [R, 128 B]; the first 32 of a block are in the highest bits."""
    return _rows(np.concatenate([blocks >> shift & 3 for shift in (6, 4, 2, 0)], axis=-1))


def _nvfp4_scale(blocks: np.ndarray) -> np.ndarray:
    """Scales of e4m3 without a sign; what would be NaN is 0."""
    scale = blocks[..., :4] & 0x7F
    return _rows((scale * (scale != 0x7F).astype(np.uint8)).view(ml_dtypes.float8_e4m3fn))


_SCALE, _MINIMUM = {"scale": _float16(0)}, {"minimum": _float16(2)}
_SUPER_BLOCK = {
    **{"scale": _k_scale, "minimum": _k_minimum},
    **{"super_scale": _float16(0), "super_minimum": _float16(2, is_negated=True)},
}
LAYOUTS: Mapping[str, BlockLayout] = {
    "Q8_0": BlockLayout({"qvalue": lambda blocks: _bytes(2, 34)(blocks).view(np.int8), **_SCALE}),
    "Q4_0": BlockLayout({"qvalue": _nibbles(2, 18, 16), **_SCALE}),
    "Q4_1": BlockLayout({"codes": _nibbles(4, 20, 16), **_SCALE, **_MINIMUM}, 4),
    "Q5_0": BlockLayout({"codes": _nibbles(6, 22, 16), "high": _bytes(2, 6), **_SCALE}, 5, offset=16),
    "Q5_1": BlockLayout({"codes": _nibbles(8, 24, 16), "high": _bytes(4, 8), **_SCALE, **_MINIMUM}, 5),
    "Q2_K": BlockLayout(
        {
            "codes": _pairs_of_bits(16, 80),
            "scale": lambda blocks: _rows(blocks[..., :16] & 0xF),
            "minimum": lambda blocks: _rows(blocks[..., :16] >> 4),
            "super_scale": _float16(80),
            "super_minimum": _float16(82, is_negated=True),
        },
        2,
    ),
    "Q3_K": BlockLayout(
        {
            **{"codes": _pairs_of_bits(32, 96), "high": _bits(0, 32)},
            **{"scale": _q3_k_scale, "super_scale": _float16(108)},
        },
        3,
        offset=4,
    ),
    "Q4_K": BlockLayout({"codes": _nibbles(16, 144, 32), **_SUPER_BLOCK}, 4),
    "Q5_K": BlockLayout({"codes": _nibbles(48, 176, 32), "high": _bits(16, 48), **_SUPER_BLOCK}, 5),
    "Q6_K": BlockLayout(
        {
            **{"codes": _nibbles(0, 128, 64), "high": _pairs_of_bits(128, 192)},
            "scale": lambda blocks: _bytes(192, 208)(blocks).view(np.int8),
            "super_scale": _float16(208),
        },
        6,
        offset=32,
    ),
    "TQ1_0": BlockLayout({"codes": _tq1_0_codes, "scale": _float16(52)}, 2, offset=1),
    "TQ2_0": BlockLayout({"codes": _pairs_of_bits(0, 64), "scale": _float16(64)}, 2, offset=1),
    "I2_S": BlockLayout({"numbers": _i2_s_numbers}),
    "IQ4_NL": BlockLayout({"codes": _nibbles(2, 18, 16), **_SCALE}, 4, levels=IQ4_LEVELS),
    "IQ4_XS": BlockLayout(
        {"codes": _nibbles(8, 136, 16), "scale": _iq4_xs_scale, "super_scale": _float16(0)}, 4, levels=IQ4_LEVELS
    ),
    "MXFP4": BlockLayout(
        {
            "value": _nibbles(1, 17, 16),
            "scale": lambda blocks: _viewed(blocks[..., 0], ml_dtypes.float8_e8m0fnu),
        }
    ),
    "NVFP4": BlockLayout({"codes": _nibbles(4, 36, 8), "scale": _nvfp4_scale}, 4, levels=E2M1_LEVELS),
}
