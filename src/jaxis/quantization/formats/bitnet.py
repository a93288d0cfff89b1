"""BitNet's ternary weights: -1, 0 and 1 times one scale, for inputs of int8 with one scale for each token.

Packed, `weight` is uint8 [out / 4, in]: bits 2 i and 2 i + 1 are 1 more than row i * out / 4 + (the byte's row).
`weight_scale` is one float. Source: transformers' integrations/bitnet.py (BitLinear, AutoBitLinear, pack_weights).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from jaxis.kernels.weights import CodedWeight, TokenQuantizedWeight
from jaxis.kernels.weights.code_planes import code_planes
from jaxis.layers.weight_format import TensorSpec
from jaxis.quantization.formats.integer_groups import check_columns
from jaxis.quantization.formats.integers import SCALE_DTYPES

_PER_BYTE = 4
_SMALLEST_SCALE = 1e-5


@dataclass(frozen=True)
class BitNetFormat:
    """`weight`, packed or as floats -1, 0 and 1, and `weight_scale`.

    `divides` says that the scale divides the weight. With `rounds`, `weight` has the floats that are trained, which
    become ternary here, and there is no `weight_scale`.
    """

    divides: bool = False
    rounds: bool = False

    def tensors(self, shape: tuple[int, ...]) -> Mapping[str, TensorSpec]:
        rows, columns = shape
        check_columns(columns)
        if self.rounds:
            return {"weight": TensorSpec(shape, SCALE_DTYPES)}
        if rows % _PER_BYTE:
            raise ValueError(f"has {rows} output features, which the {_PER_BYTE} values of a byte do not divide")
        return {
            "weight": TensorSpec(
                (rows // _PER_BYTE, columns), (np.dtype(np.uint8), *SCALE_DTYPES), other_shapes=(tuple(shape),)
            ),
            "weight_scale": TensorSpec((1,), SCALE_DTYPES, other_shapes=((),), sample=(1.0,)),
        }

    def assemble(self, tensors: Mapping[str, np.ndarray], shape: tuple[int, ...]) -> TokenQuantizedWeight:
        weight = tensors["weight"]
        if self.rounds:
            return _rounded(weight.astype(np.float32))
        scale = tensors["weight_scale"].reshape(()).astype(np.float32)
        if weight.dtype == np.uint8 and len(weight) * _PER_BYTE == shape[0]:
            numbers = np.concatenate([weight >> 2 * i & 3 for i in range(_PER_BYTE)])
        else:
            floats = weight.astype(np.float32)
            numbers = np.where(np.isin(floats, (-1, 0, 1)), floats + 1, 3).astype(np.uint8)
        with np.errstate(divide="ignore"):
            return ternary_weight(numbers, float(1 / scale if self.divides else scale))


def ternary_weight(numbers: np.ndarray, scale: float) -> TokenQuantizedWeight:
    """Returns the weight [out, in] of `scale * (number - 1)`, for numbers uint8 0 to 2.

    Raises ValueError, whose message follows "a weight", for other numbers, or a scale that is not finite.
    """
    if not np.isfinite(scale):
        raise ValueError("whose scale is not finite")
    if (numbers > 2).any():
        raise ValueError("which has values other than -1, 0 and 1")
    ones = np.ones((len(numbers), 1))
    codes = CodedWeight(
        code_planes(numbers, 2)["codes"],
        ones.astype(np.uint8),
        super_scale=ones.astype(np.float32),
        bits=2,
        offset=1,
        act_qtype="integers",
    )
    return TokenQuantizedWeight(codes, np.full((1, 1), scale, np.float32))


def _rounded(weight: np.ndarray) -> TokenQuantizedWeight:
    """Returns floats divided by their mean magnitude, rounded to -1, 0 and 1; times that."""
    inverse = np.float32(1) / np.maximum(np.abs(weight).mean(dtype=np.float32), np.float32(_SMALLEST_SCALE))
    numbers = np.clip(np.rint(weight * inverse), -1, 1) + 1 if inverse > 0 else np.full_like(weight, 3)
    return ternary_weight(numbers.astype(np.uint8), float(1 / inverse))
