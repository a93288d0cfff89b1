from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jaxis.layers.linear import JaxLinear
from jaxis.layers.weight_format import WeightSlot
from jaxis.layers.weight_method import WeightedLayer
from jaxis.loading.safetensors import TensorInfo
from jaxis.quantization.checkpoint_format import CheckpointFormat, as_stored
from jaxis.quantization.formats.bitnet import BitNetFormat
from jaxis.quantization.module_patterns import WHERE, check_keys, is_meant, is_unconverted, unconverted_modules
from jaxis.quantization.stored import StoredConfig
from jaxis.quantization.tensor_names import TensorNames

_KEYS: dict[str, tuple[Any, ...] | None] = {
    **dict.fromkeys(("quant_method", "modules_to_not_convert", "rms_norm_eps")),
    "linear_class": ("bitlinear", "autobitlinear"),
    "quantization_mode": ("offline", "online"),
    "use_rms_norm": (False,),
}


class BitNetQuantizationConfig(StoredConfig):
    """A `quantization_config` whose `quant_method` is "bitnet". A QuantizationConfig.

    Its `linear_class` "bitlinear" divides by the stored scales, "autobitlinear" multiplies by them or, where
    `quantization_mode` is "online", rounds floats as they are loaded. Raises ConfigError for what is not implemented.
    """

    def __init__(self, config: Mapping[str, Any], tensors: Mapping[str, TensorInfo] | None) -> None:
        check_keys(config, _KEYS, WHERE)
        super().__init__(unconverted_modules(config), TensorNames({}), tensors)
        is_auto = config.get("linear_class") == "autobitlinear"
        self._format = BitNetFormat(divides=not is_auto, rounds=is_auto and config.get("quantization_mode") == "online")

    def format_of(self, layer: WeightedLayer, names: Sequence[str]) -> BitNetFormat | None:
        is_left = any(is_meant(name, lambda each: is_unconverted(each, self._patterns)) for name in names)
        return self._format if isinstance(layer, JaxLinear) and not is_left else None

    def _is_plain(self, weight_format: Any, slot: WeightSlot, module: str) -> bool:
        return not self._format.rounds and super()._is_plain(weight_format, slot, module)


FORMATS = (CheckpointFormat(("bitnet",), as_stored(BitNetQuantizationConfig)),)
