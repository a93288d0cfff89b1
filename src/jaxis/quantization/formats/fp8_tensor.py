"""fp8 (e4m3) with one scale for a whole weight or for each of its rows.

`weight` float8_e4m3fn [out, in] comes with `weight_scale`, which multiplies it: one float of shape [] or [1], or one a
row, of shape [out] or [out, 1]. AutoFP8, vLLM, transformers, FBGEMM, ModelOpt and compressed-tensors write checkpoints
so. What they store for engines that quantize a layer's input to fp8 (`input_scale`) is not used, because here the input
is not quantized, which is never less accurate.
Source: vLLM's Fp8Config; transformers' FineGrainedFP8Config and FbgemmFp8Linear.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from jaxis.kernels.weights import BlockScaledWeight
from jaxis.layers.experts import JaxExperts
from jaxis.layers.linear import JaxLinear
from jaxis.layers.weight_format import TensorSpec
from jaxis.quantization.formats.finite import check_finite
from jaxis.quantization.module_patterns import PATTERN_KEYS
from jaxis.quantization.published import PublishedFormat

_SCALE_DTYPES = tuple(np.dtype(dtype) for dtype in (np.float32, np.float16, ml_dtypes.bfloat16))


@dataclass(frozen=True)
class Fp8TensorFormat:
    """`weight` e4m3 [out, in] and `weight_scale`: one, or one for each row.

    `has_row_scales` says which of them is usual; files may have either.
    """

    has_row_scales: bool = False

    def tensors(self, shape: tuple[int, ...]) -> Mapping[str, TensorSpec]:
        rows = shape[0]
        shapes = ((), (1,), (1, 1), (rows,), (rows, 1))
        usual = (rows, 1) if self.has_row_scales else ()
        return {
            "weight": TensorSpec(shape, (np.dtype(ml_dtypes.float8_e4m3fn),)),
            "weight_scale": TensorSpec(usual, _SCALE_DTYPES, other_shapes=shapes),
        }

    def assemble(self, tensors: Mapping[str, np.ndarray], shape: tuple[int, ...]) -> BlockScaledWeight:
        scale = tensors["weight_scale"].reshape(-1, 1)
        rows = 1 if len(scale) == shape[0] else shape[0]
        weight = BlockScaledWeight(tensors["weight"], scale, (rows, shape[1]))
        check_finite(weight)
        return weight


FP8_TENSOR = PublishedFormat(
    read=lambda _: Fp8TensorFormat(),
    layers=(JaxLinear, JaxExperts),
    keys={
        **dict.fromkeys(("quant_method", *PATTERN_KEYS)),
        "activation_scheme": ("dynamic", "static"),
        "weight_block_size": (None,),
        "fmt": ("e4m3", "float8_e4m3fn", None),
        "modules_to_convert": (None, []),
        "dequantize": (False,),
        # Of a quantized KV cache, whose scales are not used.
        **dict.fromkeys(("kv_cache_scheme", "kv_cache_quant_targets", "kv_cache_quant_layers")),
    },
    # transformers' and Mistral's names.
    renames={"weight_scale_inv": "weight_scale", "qscale_weight": "weight_scale"},
)

FBGEMM_FP8 = PublishedFormat(
    read=lambda _: Fp8TensorFormat(has_row_scales=True),
    layers=(JaxLinear, JaxExperts),
    # An upper bound of activations' scales, for engines that quantize them.
    keys=dict.fromkeys(("quant_method", "modules_to_not_convert", "activation_scale_ub")),
)
"""Meta's format: a scale for each row. Llama 4's experts are transposed stacks; scales [X, 1, out] or [X, out, 1]."""
