"""NVFP4: e2m1 elements, two per byte, with an e4m3 scale for every 16 and a float32 for the whole weight.

ModelOpt stores `weight` uint8 [out, in / 2], `weight_scale` e4m3 [out, in / 16] and `weight_scale_2` float32 [], which
multiplies the scales. compressed-tensors has `weight_packed` for `weight`, and `weight_global_scale` float32 [1], which
divides them. Its reciprocal multiplies here, so that scales stay in 8 bits: an element then differs by at most two
units in the last place of float32 from what the library computes, which it rounds to bfloat16.
Source: ModelOpt's NVFP4QTensor; compressed-tensors' NVFP4PackedCompressor.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from jaxis.kernels.weights import CodedWeight
from jaxis.layers.weight_format import TensorSpec
from jaxis.quantization.formats.finite import check_finite_scales

GROUP_SIZE = 16
E2M1_LEVELS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_E4M3, _FLOAT32 = np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(np.float32)


@dataclass(frozen=True)
class NvFp4Format:
    """The packed elements, their scales and the scale of those, by their names in the file.

    If `divides`, the scale of the scales divides them instead of multiplying.
    """

    weight_name: str = "weight"
    scale_name: str = "weight_scale_2"
    divides: bool = False

    def tensors(self, shape: tuple[int, ...]) -> Mapping[str, TensorSpec]:
        rows, columns = shape
        if columns % GROUP_SIZE:
            raise ValueError(f"has {columns} input features, which groups of {GROUP_SIZE} do not divide")
        return {
            self.weight_name: TensorSpec((rows, columns // 2), (np.dtype(np.uint8),)),
            "weight_scale": TensorSpec((rows, columns // GROUP_SIZE), (_E4M3,)),
            self.scale_name: TensorSpec((), (_FLOAT32,), other_shapes=((1,), (1, 1))),
        }

    def assemble(self, tensors: Mapping[str, np.ndarray], shape: tuple[int, ...]) -> CodedWeight:
        scale, factor = tensors["weight_scale"], tensors[self.scale_name].astype(np.float32).reshape(())
        if self.divides:
            if factor == 0 and scale.any():
                raise ValueError(f"whose {self.scale_name}, which divides its scales, is 0")
            factor = np.float32(1) / factor if factor else factor
        check_finite_scales(scale, factor)
        # One for each row, so that rows can be looked up, sharded and stacked like the other arrays.
        super_scale = np.full((shape[0], 1), factor, np.float32)
        return CodedWeight(tensors[self.weight_name], scale, super_scale=super_scale, bits=4, levels=E2M1_LEVELS)


NVFP4 = NvFp4Format()
NVFP4_PACKED = NvFp4Format("weight_packed", "weight_global_scale", divides=True)
"""The form of compressed-tensors."""
