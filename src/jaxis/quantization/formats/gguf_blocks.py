"""The blocks of GGUF tensors, taken apart into the arrays of a CodedWeight.

Each function takes blocks, uint8 [R, B, bytes] of R rows with B blocks each, and returns arrays [R, ...] by the names
of CodedWeight's fields. Source: ggml's `ggml-common.h` and `ggml-quants.c`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import ml_dtypes
import numpy as np

Arrays = dict[str, np.ndarray]

# What the codes of the non-linear 4-bit types mean, and those of e2m1 floats.
IQ4_LEVELS = tuple(float(x) for x in (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113))
_E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1_LEVELS = (*_E2M1_MAGNITUDES, *(-x for x in _E2M1_MAGNITUDES))


@dataclass(frozen=True)
class BlockLayout:
    """Conversion of a type of blocks, which `take_apart` takes apart, to a CodedWeight with these fields."""

    take_apart: Callable[[np.ndarray], Arrays]
    bits: int
    offset: int = 0
    levels: tuple[float, ...] | None = None


def nibble_pairs(runs: np.ndarray) -> np.ndarray:
    """4-bit codes, neighbours in a byte: uint8 [..., runs, n] -> uint8 [..., runs, n].

    In the file, the low nibbles of a run's n bytes are its first n codes, and the high ones the other n.
    """
    two = np.ascontiguousarray(runs).view("<u2")
    first = (two & 0xF) | ((two >> 4) & 0xF0)
    second = ((two >> 4) & 0xF) | ((two >> 8) & 0xF0)
    return np.concatenate([first.astype(np.uint8), second.astype(np.uint8)], axis=-1)


def float16_of(blocks: np.ndarray, first: int) -> np.ndarray:
    """The float16 at this byte of each block: [R, B]."""
    return np.ascontiguousarray(blocks[..., first : first + 2]).view("<f2")[..., 0]


def _two_bit_codes(runs: np.ndarray) -> np.ndarray:
    """Four 2-bit codes a byte: uint8 [..., runs, n] -> [..., runs, n], n a multiple of 4.

    The file has n codes in bits 0 and 1, and so on.
    """
    words = np.ascontiguousarray(runs).view("<u4")
    codes = []
    for shift in (0, 2, 4, 6):
        each = (words >> shift) & 0x03030303
        codes.append(((each | (each >> 6) | (each >> 12) | (each >> 18)) & 0xFF).astype(np.uint8))
    return np.concatenate(codes, axis=-1)


def _bit_plane(runs: np.ndarray) -> np.ndarray:
    """Eight 1-bit codes a byte: uint8 [..., 32] -> [..., 32]; in the file, bit i of byte j belongs to code 32 i + j."""
    bits = np.unpackbits(runs, axis=-1, bitorder="little").reshape(*runs.shape, 8)
    return np.packbits(bits.swapaxes(-1, -2), axis=-1, bitorder="little").reshape(runs.shape)


def _rows(array: np.ndarray) -> np.ndarray:
    return array.reshape(len(array), -1)


def _runs(blocks: np.ndarray, first: int, end: int, size: int) -> np.ndarray:
    """Bytes `first` to `end` of each block, in runs of `size`: [R, B, runs, size]."""
    return blocks[..., first:end].reshape(*blocks.shape[:2], -1, size)


def _q4_1(blocks: np.ndarray) -> Arrays:
    codes = _rows(nibble_pairs(_runs(blocks, 4, 20, 16)))
    return {"codes": codes, "scale": float16_of(blocks, 0), "minimum": float16_of(blocks, 2)}


def _q5_0(blocks: np.ndarray) -> Arrays:
    codes = _rows(nibble_pairs(_runs(blocks, 6, 22, 16)))
    return {"codes": codes, "high": _rows(blocks[..., 2:6]), "scale": float16_of(blocks, 0)}


def _q5_1(blocks: np.ndarray) -> Arrays:
    codes = _rows(nibble_pairs(_runs(blocks, 8, 24, 16)))
    scale, minimum = float16_of(blocks, 0), float16_of(blocks, 2)
    return {"codes": codes, "high": _rows(blocks[..., 4:8]), "scale": scale, "minimum": minimum}


def _q2_k(blocks: np.ndarray) -> Arrays:
    return {
        "codes": _rows(_two_bit_codes(_runs(blocks, 16, 80, 32))),
        "scale": _rows(blocks[..., :16] & 0xF),
        "minimum": _rows(blocks[..., :16] >> 4),
        "super_scale": float16_of(blocks, 80),
        "super_minimum": -float16_of(blocks, 82),
    }


def _q3_k(blocks: np.ndarray) -> Arrays:
    packed = blocks[..., 96:108]
    low = np.concatenate([packed[..., :8] & 0xF, packed[..., :8] >> 4], axis=-1)
    high = np.concatenate([(packed[..., 8:] >> shift) & 3 for shift in (0, 2, 4, 6)], axis=-1)
    return {
        "codes": _rows(_two_bit_codes(_runs(blocks, 32, 96, 32))),
        "high": _rows(_bit_plane(blocks[..., :32])),
        "scale": _rows((low | (high << 4)).view(np.int8) - np.int8(32)),
        "super_scale": float16_of(blocks, 108),
    }


def _k_scales(packed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The scales and minima, of 6 bits, in 12 bytes of a block: uint8 [R, 8 B] each."""
    a, b, c = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scale = np.concatenate([a & 63, (c & 15) | ((a >> 6) << 4)], axis=-1)
    minimum = np.concatenate([b & 63, (c >> 4) | ((b >> 6) << 4)], axis=-1)
    return _rows(scale), _rows(minimum)


def _q4_k(blocks: np.ndarray) -> Arrays:
    scale, minimum = _k_scales(blocks[..., 4:16])
    return {
        "codes": _rows(nibble_pairs(_runs(blocks, 16, 144, 32))),
        "scale": scale,
        "minimum": minimum,
        "super_scale": float16_of(blocks, 0),
        "super_minimum": -float16_of(blocks, 2),
    }


def _q5_k(blocks: np.ndarray) -> Arrays:
    scale, minimum = _k_scales(blocks[..., 4:16])
    return {
        "codes": _rows(nibble_pairs(_runs(blocks, 48, 176, 32))),
        "high": _rows(_bit_plane(blocks[..., 16:48])),
        "scale": scale,
        "minimum": minimum,
        "super_scale": float16_of(blocks, 0),
        "super_minimum": -float16_of(blocks, 2),
    }


def _q6_k(blocks: np.ndarray) -> Arrays:
    return {
        "codes": _rows(nibble_pairs(_runs(blocks, 0, 128, 64))),
        "high": _rows(_two_bit_codes(_runs(blocks, 128, 192, 32))),
        "scale": _rows(blocks[..., 192:208]).view(np.int8),
        "super_scale": float16_of(blocks, 208),
    }


def _iq4_nl(blocks: np.ndarray) -> Arrays:
    return {"codes": _rows(nibble_pairs(_runs(blocks, 2, 18, 16))), "scale": float16_of(blocks, 0)}


def _iq4_xs(blocks: np.ndarray) -> Arrays:
    high = np.ascontiguousarray(blocks[..., 2:4]).view("<u2")
    high = ((high >> np.arange(0, 16, 2, dtype=np.uint16)) & 3).astype(np.uint8)
    low = (blocks[..., 4:8, None] >> np.array([0, 4], np.uint8)).reshape(high.shape) & 0xF
    return {
        "codes": _rows(nibble_pairs(_runs(blocks, 8, 136, 16))),
        "scale": _rows((low | (high << 4)).view(np.int8) - np.int8(32)),
        "super_scale": float16_of(blocks, 0),
    }


def _nvfp4(blocks: np.ndarray) -> Arrays:
    # Scales are e4m3 without a sign; what would be NaN is 0.
    scale = blocks[..., :4] & 0x7F
    scale = np.where(scale == 0x7F, np.uint8(0), scale).view(ml_dtypes.float8_e4m3fn)
    return {"codes": _rows(nibble_pairs(_runs(blocks, 4, 36, 8))), "scale": _rows(scale)}


LAYOUTS: Mapping[str, BlockLayout] = {
    "Q4_1": BlockLayout(_q4_1, 4),
    "Q5_0": BlockLayout(_q5_0, 5, offset=16),
    "Q5_1": BlockLayout(_q5_1, 5),
    "Q2_K": BlockLayout(_q2_k, 2),
    "Q3_K": BlockLayout(_q3_k, 3, offset=4),
    "Q4_K": BlockLayout(_q4_k, 4),
    "Q5_K": BlockLayout(_q5_k, 5),
    "Q6_K": BlockLayout(_q6_k, 6, offset=32),
    "IQ4_NL": BlockLayout(_iq4_nl, 4, levels=IQ4_LEVELS),
    "IQ4_XS": BlockLayout(_iq4_xs, 4, levels=IQ4_LEVELS),
    "NVFP4": BlockLayout(_nvfp4, 4, levels=E2M1_LEVELS),
}
