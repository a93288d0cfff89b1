"""MXFP4, as the experts of GPT-OSS are published: e2m1 elements, two per byte, with a power-of-two scale for every 32.

All experts share `gate_up_proj_blocks` uint8 [X, 2F, E / 32, 16] and `gate_up_proj_scales` uint8 [X, 2F, E / 32] (the
exponent plus 127), with alternating rows of gate and up, and similar `down_proj_...`; nothing else is quantized.
Source: OCP Microscaling Formats 1.0; transformers' Mxfp4Config and convert_moe_packed_tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from jaxis.kernels.weights import BlockScaledWeight
from jaxis.layers.experts import JaxExperts
from jaxis.layers.weight_format import TensorSpec
from jaxis.quantization.formats.finite import check_finite
from jaxis.quantization.published import PublishedFormat

GROUP_SIZE = 32


@dataclass(frozen=True)
class Mxfp4Format:
    """`blocks` uint8 [out, in / 32, 16] and `scales` [out, in / 32], the bits of e8m0."""

    def tensors(self, shape: tuple[int, ...]) -> Mapping[str, TensorSpec]:
        rows, columns = shape
        if columns % GROUP_SIZE:
            raise ValueError(f"has {columns} features, which groups of {GROUP_SIZE} do not divide")
        groups = columns // GROUP_SIZE
        return {
            "blocks": TensorSpec((rows, groups, GROUP_SIZE // 2), (np.dtype(np.uint8),)),
            "scales": TensorSpec((rows, groups), (np.dtype(np.uint8), np.dtype(ml_dtypes.float8_e8m0fnu))),
        }

    def assemble(self, tensors: Mapping[str, np.ndarray], shape: tuple[int, ...]) -> BlockScaledWeight:
        value = tensors["blocks"].reshape(shape[0], -1)
        weight = BlockScaledWeight(value, tensors["scales"].view(ml_dtypes.float8_e8m0fnu), (1, GROUP_SIZE))
        check_finite(weight)
        return weight


MXFP4 = PublishedFormat(
    read=lambda _: Mxfp4Format(),
    layers=(JaxExperts,),
    keys={**dict.fromkeys(("quant_method", "modules_to_not_convert")), "dequantize": (False,)},
)
