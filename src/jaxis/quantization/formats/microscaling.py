"""Low-precision floats with a power-of-two scale for every 32 input features (OCP Microscaling Formats 1.0), for linear
layers: MXFP4, MXFP6 (e2m3) and MXFP8 (e4m3).

compressed-tensors stores `weight_packed` uint8 [out, in * bits / 8] (MXFP8: `weight` e4m3 [out, in]), densely, earlier
elements in lower bits; `weight_scale` [out, in / 32] has the exponents plus 127. GPT-OSS' MXFP4 is in `mxfp4`.
Source: compressed-tensors' MXFP4PackedCompressor, MXFP6PackedCompressor and MXFP8QuantizationCompressor.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from jaxis.kernels.weights import BlockScaledWeight, CodedWeight
from jaxis.kernels.weights.code_planes import code_planes
from jaxis.layers.weight_format import TensorSpec
from jaxis.quantization.formats.finite import check_exponents, check_finite, check_finite_scales
from jaxis.quantization.formats.word_packing import unpack_numbers

GROUP_SIZE = 32
_E8M0 = np.dtype(ml_dtypes.float8_e8m0fnu)
_FP6_BITS, _FP6_MAGNITUDE = 6, 0x1F


def _e2m3_levels() -> tuple[float, ...]:
    """The values of the 64 codes: a sign, two bits of exponent, three of mantissa."""
    magnitudes = [mantissa / 8 for mantissa in range(8)]
    magnitudes += [2.0**exponent * (1 + mantissa / 8) for exponent in range(3) for mantissa in range(8)]
    return (*magnitudes, *(-magnitude if magnitude else 0.0 for magnitude in magnitudes))


E2M3_LEVELS = _e2m3_levels()


@dataclass(frozen=True)
class MicroscalingFormat:
    """Elements of 4, 6 or 8 bits, named `weight_name` in the file, and their scales."""

    bits: int
    weight_name: str
    scale_name: str = "weight_scale"

    def tensors(self, shape: tuple[int, ...]) -> Mapping[str, TensorSpec]:
        rows, columns = shape
        if columns % GROUP_SIZE:
            raise ValueError(f"has {columns} input features, which groups of {GROUP_SIZE} do not divide")
        dtypes = (np.uint8, np.int8) if self.bits < 8 else (ml_dtypes.float8_e4m3fn,)
        return {
            self.weight_name: TensorSpec((rows, columns * self.bits // 8), tuple(np.dtype(each) for each in dtypes)),
            self.scale_name: TensorSpec((rows, columns // GROUP_SIZE), (np.dtype(np.uint8), _E8M0)),
        }

    def assemble(self, tensors: Mapping[str, np.ndarray], shape: tuple[int, ...]) -> BlockScaledWeight | CodedWeight:
        value, scale = tensors[self.weight_name], tensors[self.scale_name].view(_E8M0)
        value = value.view(np.uint8) if value.dtype == np.int8 else value
        if self.bits == _FP6_BITS:
            return _fp6_weight(value, scale, shape[1])
        weight = BlockScaledWeight(value, scale, (1, GROUP_SIZE))
        check_finite(weight)
        return weight


def _fp6_weight(packed: np.ndarray, scale: np.ndarray, columns: int) -> CodedWeight:
    check_finite_scales(scale)
    # A group of 32 is 24 bytes: whole words.
    codes = unpack_numbers(np.ascontiguousarray(packed).view("<u4"), _FP6_BITS, columns)
    check_exponents(scale, codes, (1, GROUP_SIZE), _FP6_MAGNITUDE)
    planes = code_planes(codes, _FP6_BITS)
    return CodedWeight(planes["codes"], scale, planes["high"], bits=_FP6_BITS, levels=E2M3_LEVELS)
