"""fp8 (e4m3) with one scale for a whole weight, as AutoFP8 and many of NVIDIA's and Meta's checkpoints are published.

`weight` float8_e4m3fn [out, in] comes with `weight_scale`, one float of shape [] or [1] that multiplies it. With
`activation_scheme` "static" there is also an `input_scale`, for engines that quantize a layer's input to fp8: it is
read but not used, because here the input is not quantized, which is never less accurate. compressed-tensors'
`float-quantized` with `strategy` "tensor" is the same.
Source: vLLM's Fp8Config.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from jaxis.kernels.weights import BlockScaledWeight
from jaxis.layers.experts import JaxExperts
from jaxis.layers.linear import JaxLinear
from jaxis.layers.weight_format import TensorSpec
from jaxis.quantization.formats.finite import check_finite
from jaxis.quantization.module_patterns import PATTERN_KEYS
from jaxis.quantization.published import PublishedFormat

_ONE_FLOAT = TensorSpec(
    (), tuple(np.dtype(dtype) for dtype in (np.float32, np.float16, ml_dtypes.bfloat16)), other_shapes=((1,),)
)


@dataclass(frozen=True)
class Fp8TensorFormat:
    """`weight` and its scale.

    Attributes:
      has_input_scale: Whether the file has an `input_scale`.
    """

    has_input_scale: bool = False

    def tensors(self, shape: tuple[int, ...]) -> Mapping[str, TensorSpec]:
        specs = {"weight": TensorSpec(shape, (np.dtype(ml_dtypes.float8_e4m3fn),)), "weight_scale": _ONE_FLOAT}
        return specs | {"input_scale": _ONE_FLOAT} if self.has_input_scale else specs

    def assemble(self, tensors: Mapping[str, np.ndarray], shape: tuple[int, ...]) -> BlockScaledWeight:
        rows, columns = shape
        weight = BlockScaledWeight(tensors["weight"], tensors["weight_scale"].reshape(1, 1), (rows, columns))
        check_finite(weight)
        return weight


def _read(config: Mapping[str, Any]) -> Fp8TensorFormat:
    return Fp8TensorFormat(has_input_scale=config.get("activation_scheme") == "static")


FP8_TENSOR = PublishedFormat(
    read=_read,
    layers=(JaxLinear, JaxExperts),
    keys={
        **dict.fromkeys(("quant_method", *PATTERN_KEYS)),
        "activation_scheme": ("dynamic", "static"),
        "weight_block_size": (None,),
        "fmt": ("e4m3", None),
    },
    is_meant=lambda config: config.get("weight_block_size") is None,
)
