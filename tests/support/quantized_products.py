"""Quantized weights and products with them, in float64 numpy."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from jaxis.kernels.weights import BlockScaledWeight, QuantizedWeight

LOW_PRECISION_FLOATS = ["float8_e4m3fn", "float4_e2m1fn"]


def integers(weight: QuantizedWeight) -> np.ndarray:
    """qvalue - zero_point, float64 [out, in]."""
    if weight.qvalue.dtype == np.int8:
        return weight.qvalue.astype(np.float64)
    nibbles = np.empty((len(weight.qvalue), 2 * weight.qvalue.shape[1]))
    nibbles[:, ::2], nibbles[:, 1::2] = weight.qvalue & 15, weight.qvalue >> 4
    point = 8.0 if weight.zero_point is None else np.repeat(weight.zero_point, weight.group_size, axis=1)
    return nibbles - point


def expected_weight(weight: QuantizedWeight) -> np.ndarray:
    """The weight that the integers stand for, float64 [out, in]."""
    return integers(weight) * np.repeat(weight.scale.astype(np.float64), weight.group_size, axis=1)


def rounded_activations(x: np.ndarray) -> np.ndarray:
    """The value of x [rows, in], float32, in products with `act_qtype` int8, in float64.

    Of each 32 features of a row: scale * q + midpoint. Scales, midpoints and what is rounded to q are float32.
    """
    out = np.zeros(x.shape)
    for start in range(0, x.shape[1], 32):
        group = x[:, start : start + 32]
        highest, lowest = group.max(axis=1, keepdims=True), group.min(axis=1, keepdims=True)
        midpoint, scale = (highest + lowest) / np.float32(2), (highest - lowest) / np.float32(254)
        steps = (group - midpoint) / np.where(scale == 0, np.float32(1), scale)
        q = np.clip(np.rint(steps), -127, 127).astype(np.float64)
        out[:, start : start + 32] = np.where(scale == 0, 0, scale) * q + midpoint
    return out


def quantized_product(x: np.ndarray, weight: QuantizedWeight) -> np.ndarray:
    """The product with int8 activations by its definition, in float64."""
    return rounded_activations(x) @ expected_weight(weight).T


def random_blocks(qtype: str, n: int, k: int, seed: int = 0) -> tuple[BlockScaledWeight, np.ndarray]:
    """A weight of random bits, denormal numbers and zeros among them, and what it stands for in float64."""
    rng = np.random.default_rng(seed)
    if qtype == "float8_e4m3fn":
        block = (128, 128)
        value = (rng.integers(0, 127, (n, k)) | rng.integers(0, 2, (n, k)) << 7).astype(np.uint8)
        value = value.view(ml_dtypes.float8_e4m3fn)
        scale = rng.uniform(1e-4, 1e-2, (-(-n // 128), -(-k // 128))).astype(np.float32)
        wide = value.astype(np.float64)
    else:
        block = (1, 32)
        nibbles = rng.integers(0, 16, (n, k)).astype(np.uint8)
        value = nibbles[:, ::2] | nibbles[:, 1::2] << 4
        scale = rng.integers(110, 125, (n, k // 32)).astype(np.uint8).view(ml_dtypes.float8_e8m0fnu)
        wide = nibbles.view(ml_dtypes.float4_e2m1fn).astype(np.float64)
    expanded = np.repeat(np.repeat(scale.astype(np.float64), block[0], axis=0), block[1], axis=1)
    return BlockScaledWeight(value, scale, block), wide * expanded[:n, :k]
