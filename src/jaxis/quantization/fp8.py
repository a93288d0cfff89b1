"""Checkpoints of fp8 (e4m3) weights with a scale for each block, as DeepSeek V3, Kimi K2 and Qwen3-FP8 are published.

Beside `weight` float8_e4m3fn [out, in] stands `weight_scale_inv` [ceil(out / rows), ceil(in / columns)], by which a
block's values are multiplied (the name notwithstanding). `activation_scheme` "dynamic" lets an engine quantize the
input of a layer to fp8 as it comes; here it stays as it is, which is never less exact.
Source: transformers' FineGrainedFP8Config and Fp8Dequantize.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from jaxis.errors import ConfigError
from jaxis.quantization.block_scaled import BlockScaledLinearMethod, StoredBlocksMethod
from jaxis.quantization.block_scaled_experts import BlockScaledExpertsMethod, StoredBlockExpertsMethod, StoredStacks
from jaxis.quantization.unconverted import WHERE, check_keys, is_unconverted, unconverted_modules

if TYPE_CHECKING:
    from flax import nnx

    from jaxis.quantization.config import ExpertsMethod, LinearMethod

SCALE_NAME = "weight_scale_inv"
_KEYS: dict[str, tuple[Any, ...] | None] = {
    **dict.fromkeys(("quant_method", "weight_block_size", "modules_to_not_convert", "ignored_layers")),
    "activation_scheme": ("dynamic",),
    "fmt": ("e4m3", None),
    # How the scales are stored; their tensors say it too.
    "scale_fmt": ("float", "ue8m0", None),
    "modules_to_convert": (None, []),
    "expert_dtype": ("fp8",),
    "dequantize": (False,),
}


class Fp8Config:
    """A `quantization_config` whose `quant_method` is "fp8". A QuantizationConfig.

    Raises:
      ConfigError: It asks for something that is not implemented.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        check_keys(config, _KEYS)
        block = config.get("weight_block_size")
        if not isinstance(block, list | tuple) or len(block) != 2 or not all(type(n) is int and n > 0 for n in block):
            raise ConfigError(f"{WHERE}: weight_block_size={block!r} is not supported; supported: [rows, columns]")
        self.block_shape = (block[0], block[1])
        self._unconverted = unconverted_modules(config)

    def get_quant_method(self, layer: nnx.Module, prefix: str) -> LinearMethod | ExpertsMethod | None:
        """As QuantizationConfig's."""
        from jaxis.layers.experts import JaxExperts
        from jaxis.layers.linear import JaxLinear

        if not isinstance(layer, JaxLinear | JaxExperts) or is_unconverted(prefix, self._unconverted):
            return None
        if isinstance(layer, JaxExperts):
            stored = StoredStacks("", f"_{SCALE_NAME}", is_mxfp4=False, block_shape=self.block_shape)
            return StoredBlockExpertsMethod(stored, BlockScaledExpertsMethod())
        return StoredBlocksMethod(self.block_shape, SCALE_NAME, BlockScaledLinearMethod())

    def check_all_used(self) -> None:
        """As QuantizationConfig's; the file's list may name modules that have no weight matrix."""
