from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxis.errors import ConfigError
from jaxis.layers.latent_projection import LatentUpProjection
from jaxis.layers.weight_format import PLAIN, WeightFormat
from jaxis.layers.weight_method import WeightedLayer, WeightMethod
from jaxis.loading.gguf_block_types import TYPE_OF_NAME
from jaxis.loading.gguf_config_keys import QUANT_METHOD
from jaxis.quantization.checkpoint_format import CheckpointFormat, as_stored
from jaxis.quantization.formats.gguf import GGUFFormat, LatentHeadsFormat, dequantized
from jaxis.quantization.wrappers import DequantizingConfig

_LATENT_HEADS = (".k_b", ".v_b")
_SCALED = ("NVFP4", "TQ1_0", "TQ2_0", "I2_S")


class GGUFQuantizationConfig:
    """The types of blocks in a GGUF file, module by module, from `GGUFCheckpoint.config`. A QuantizationConfig."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._block_types: Mapping[str, str] = config["block_types"]
        self._scaled = frozenset(config.get("scaled", ()))

    def get_quant_method(self, layer: WeightedLayer, prefix: str) -> WeightMethod | None:
        """Returns the method of a layer. Raises ConfigError if the layer's sizes do not fit its type."""
        if isinstance(layer, LatentUpProjection) and f"{prefix}.k_b" in self._block_types:
            formats: dict[str, WeightFormat] = {"weight": self._latent_heads(layer, prefix)}
        else:
            formats = {
                slot.name: self._format(prefix if slot.num_experts is None else f"{prefix}.{slot.name}")
                for slot in layer.weight_slots
            }
        if all(each is PLAIN for each in formats.values()):
            return None
        for slot in layer.weight_slots:
            try:
                formats[slot.name].tensors(slot.shape)
            except ValueError as error:
                raise ConfigError(f"the GGUF file does not fit the model: {prefix} {error}") from None
        return WeightMethod(formats=formats)

    def restored(self, name: str, tensor: Any) -> Any:
        """Returns floats for blocks of a parameter that is not a layer's weight: llama.cpp quantizes all matrices."""
        if name not in self._block_types or name.endswith(_LATENT_HEADS):
            return tensor
        return dequantized(TYPE_OF_NAME[self._block_types[name]], tensor)

    @property
    def unquantized(self) -> DequantizingConfig:
        return DequantizingConfig(self)

    def check_all_used(self) -> None:
        """Does nothing: loading finds tensors that are for no module."""

    def _format(self, name: str) -> WeightFormat:
        if name not in self._block_types:
            return PLAIN
        block_type, has_scale = TYPE_OF_NAME[self._block_types[name]], name in self._scaled
        if has_scale and block_type.name not in _SCALED:
            raise ConfigError(f"the GGUF file has a scale for {name}, which is of the type {block_type.name}")
        return GGUFFormat(block_type, has_scale)

    def _latent_heads(self, layer: LatentUpProjection, prefix: str) -> LatentHeadsFormat:
        key_type, value_type = (TYPE_OF_NAME[self._block_types[f"{prefix}.{name}"]] for name in ("k_b", "v_b"))
        return LatentHeadsFormat(key_type, value_type, layer.num_heads, layer.key_dim)


FORMATS = (CheckpointFormat((QUANT_METHOD,), as_stored(lambda settings, _: GGUFQuantizationConfig(settings))),)
