"""Checkpoints whose experts are MXFP4, as GPT-OSS is published: e2m1 numbers, two a byte, a power of two for each 32.

Of all experts there are `gate_up_proj_blocks` uint8 [X, 2F, E / 32, 16] and `gate_up_proj_scales` uint8 [X, 2F, E / 32]
(the exponent plus 127), gate and up row by row in turns, and `down_proj_...` likewise; nothing else is quantized.
Source: OCP Microscaling Formats 1.0; transformers' Mxfp4Config and convert_moe_packed_tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from jaxis.errors import ConfigError
from jaxis.quantization.block_scaled_experts import BlockScaledExpertsMethod, StoredBlockExpertsMethod, StoredStacks
from jaxis.quantization.unconverted import WHERE, check_keys, is_unconverted, unconverted_modules

if TYPE_CHECKING:
    from flax import nnx

    from jaxis.quantization.config import ExpertsMethod

GROUP_SIZE = 32
_STORED = StoredStacks("_blocks", "_scales", is_mxfp4=True, block_shape=(1, GROUP_SIZE))
_KEYS: dict[str, tuple[Any, ...] | None] = {
    **dict.fromkeys(("quant_method", "modules_to_not_convert")),
    "dequantize": (False,),
}


class Mxfp4Config:
    """A `quantization_config` whose `quant_method` is "mxfp4". A QuantizationConfig.

    Raises:
      ConfigError: It asks for something that is not implemented.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        check_keys(config, _KEYS)
        self._unconverted = unconverted_modules(config)

    def get_quant_method(self, layer: nnx.Module, prefix: str) -> ExpertsMethod | None:
        """As QuantizationConfig's."""
        from jaxis.layers.experts import JaxExperts

        if not isinstance(layer, JaxExperts) or is_unconverted(prefix, self._unconverted):
            return None
        for size in (layer.hidden_size, layer.intermediate_size):
            if size % GROUP_SIZE:
                raise ConfigError(f"{WHERE}: {prefix} has {size} features, which groups of {GROUP_SIZE} do not divide")
        return StoredBlockExpertsMethod(_STORED, BlockScaledExpertsMethod())

    def check_all_used(self) -> None:
        """As QuantizationConfig's; the file's list may name modules that are no experts."""
