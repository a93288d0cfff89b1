from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxis.layers.weight_format import WeightFormat
from jaxis.layers.weight_method import WeightedLayer
from jaxis.loading.safetensors import TensorInfo
from jaxis.quantization.module_patterns import WHERE, check_keys, is_meant, is_unconverted, unconverted_modules
from jaxis.quantization.stored import StoredConfig
from jaxis.quantization.tensor_names import TensorNames


@dataclass(frozen=True)
class PublishedFormat:
    """Description of a format in config.json.

    Attributes:
      read: Reads the format from the object in config.json; raises ConfigError if that is invalid.
      layers: Classes of layers that are stored in this format.
      keys: Keys that the object may have, with their values; None means any.
      renames: Other names of its tensors in files -> their names in the format.
    """

    read: Callable[[Mapping[str, Any]], WeightFormat]
    layers: tuple[type, ...]
    keys: Mapping[str, tuple[Any, ...] | None]
    renames: Mapping[str, str] = field(default_factory=dict)


class PublishedQuantizationConfig(StoredConfig):
    """A `quantization_config` that stores all modules in one format, except those that it lists. A QuantizationConfig.

    Raises ConfigError if the object asks for something that is not implemented.
    """

    def __init__(
        self, published: PublishedFormat, config: Mapping[str, Any], tensors: Mapping[str, TensorInfo] | None = None
    ) -> None:
        check_keys(config, published.keys, WHERE)
        super().__init__(unconverted_modules(config), TensorNames(published.renames), tensors)
        self.format = published.read(config)
        self._layers = published.layers

    def format_of(self, layer: WeightedLayer, names: Sequence[str]) -> WeightFormat | None:
        if not isinstance(layer, self._layers):
            return None
        is_left = any(is_meant(name, lambda each: is_unconverted(each, self._patterns)) for name in names)
        return None if is_left else self.format
