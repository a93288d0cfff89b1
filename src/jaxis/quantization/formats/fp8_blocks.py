"""fp8 (e4m3) with a scale for each block, as DeepSeek V3, Kimi K2 and Qwen3-FP8 are published.

`weight` float8_e4m3fn [out, in] comes with `weight_scale_inv` [ceil(out / rows), ceil(in / columns)], which multiplies
the values of a block (despite the name). `activation_scheme` "dynamic" allows engines to quantize the input of a layer
to fp8 dynamically; here it is not quantized, which is never less accurate. compressed-tensors' `float-quantized` is the
same with the scales named `weight_scale`. Source: transformers' FineGrainedFP8Config and Fp8Dequantize.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from jaxis.errors import ConfigError
from jaxis.kernels.weights import BlockScaledWeight
from jaxis.kernels.weights.block_scaled_weight import scale_shape
from jaxis.layers.experts import JaxExperts
from jaxis.layers.linear import JaxLinear
from jaxis.layers.weight_format import TensorSpec
from jaxis.quantization.formats.finite import check_finite
from jaxis.quantization.module_patterns import PATTERN_KEYS, WHERE
from jaxis.quantization.published import PublishedFormat

SCALE_DTYPES = tuple(
    np.dtype(dtype) for dtype in (np.float32, np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e8m0fnu)
)


@dataclass(frozen=True)
class Fp8BlocksFormat:
    """`weight` and a scale for each of its blocks.

    Attributes:
      block_shape: (rows, columns) of a block; None means all columns.
      scale_name: Name of the scales in the file.
      has_unit_axes: True if the scales are stored as [rows of blocks, 1, columns of blocks, 1].
      has_exponents: True if scales are powers of two, stored as bytes of their exponents plus 127.
    """

    block_shape: tuple[int, int | None]
    scale_name: str = "weight_scale_inv"
    has_unit_axes: bool = False
    has_exponents: bool = False

    def tensors(self, shape: tuple[int, ...]) -> Mapping[str, TensorSpec]:
        rows, columns = scale_shape(shape, self._block_of(shape))
        return {
            "weight": TensorSpec(shape, (np.dtype(ml_dtypes.float8_e4m3fn),)),
            self.scale_name: TensorSpec(
                (rows, columns),
                (*SCALE_DTYPES, np.dtype(np.uint8)) if self.has_exponents else SCALE_DTYPES,
                other_shapes=((rows, 1, columns, 1),) if self.has_unit_axes else (),
            ),
        }

    def assemble(self, tensors: Mapping[str, np.ndarray], shape: tuple[int, ...]) -> BlockScaledWeight:
        scale = tensors[self.scale_name].reshape(scale_shape(shape, self._block_of(shape)))
        if scale.dtype == np.uint8:
            scale = scale.view(ml_dtypes.float8_e8m0fnu)
        weight = BlockScaledWeight(tensors["weight"], scale, self._block_of(shape))
        check_finite(weight)
        return weight

    def _block_of(self, shape: tuple[int, ...]) -> tuple[int, int]:
        rows, columns = self.block_shape
        return rows, columns or shape[1]


def _read(config: Mapping[str, Any]) -> Fp8BlocksFormat:
    block = config.get("weight_block_size")
    if not isinstance(block, list | tuple) or len(block) != 2 or not all(type(n) is int and n > 0 for n in block):
        raise ConfigError(f"{WHERE}: weight_block_size={block!r} is not supported; supported: [rows, columns]")
    return Fp8BlocksFormat((block[0], block[1]), has_exponents=config.get("scale_fmt") == "ue8m0")


FP8_BLOCKS = PublishedFormat(
    read=_read,
    layers=(JaxLinear, JaxExperts),
    keys={
        **dict.fromkeys(("quant_method", "weight_block_size", *PATTERN_KEYS)),
        "activation_scheme": ("dynamic",),
        "fmt": ("e4m3", "float8_e4m3fn", None),
        # How the scales are stored, which their tensors show as well.
        "scale_fmt": ("float", "ue8m0", None),
        # Qwen3.8-Flash-Next's table of n-grams, whose rows have any type.
        "modules_to_convert": (None, [], ["ple.ple_embedding.ngram_embedding"]),
        **dict.fromkeys(("weight_per_tensor", "act_per_tensor"), (False,)),
        "expert_dtype": ("fp8",),
        "dequantize": (False,),
    },
)
