"""What quantized weights and products with them are, in float64 numpy."""

from __future__ import annotations

import numpy as np

from jaxis.kernels.quantized_matmul import QuantizedWeight


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


def quantized_product(x: np.ndarray, weight: QuantizedWeight, act_tile: int) -> np.ndarray:
    """The definition, group by group, in float64, but for the activations' scales, which are float32."""
    in_size = x.shape[1]
    q_w, y = integers(weight), np.zeros((len(x), len(weight.qvalue)))
    for start in range(0, in_size, act_tile):
        group = slice(start, min(start + act_tile, in_size))
        scale = np.abs(x[:, group]).max(axis=1, keepdims=True) / np.float32(127)
        safe = np.where(scale == 0, np.float32(1), scale)
        q_x = np.rint(x[:, group] / safe).astype(np.float64)
        s_w = weight.scale.astype(np.float64)[:, start // weight.group_size]
        y += scale * s_w * (q_x @ q_w[:, group].T)
    return y
