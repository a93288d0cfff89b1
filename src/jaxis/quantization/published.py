"""Checkpoints whose `quantization_config` stores all modules in one format, except those that it lists."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from jaxis.errors import ConfigError
from jaxis.layers.weight_format import WeightFormat
from jaxis.layers.weight_method import WeightedLayer, WeightMethod
from jaxis.quantization.module_patterns import WHERE, check_keys, is_unconverted, unconverted_modules


@dataclass(frozen=True)
class PublishedFormat:
    """How config.json describes a format.

    Attributes:
      read: Reads the format from the object in config.json; raises ConfigError if that is invalid.
      layers: The classes of layers that are stored in this format.
      keys: The keys that the object may have, with their values; None means any.
      is_meant: Whether the object describes this format, if its `quant_method` has several.
    """

    read: Callable[[Mapping[str, Any]], WeightFormat]
    layers: tuple[type, ...]
    keys: Mapping[str, tuple[Any, ...] | None]
    is_meant: Callable[[Mapping[str, Any]], bool] = lambda _: True


class PublishedQuantizationConfig:
    """A `quantization_config` of one format. A QuantizationConfig.

    Args:
      published: The format's description.
      config: The object in config.json.

    Raises:
      ConfigError: It asks for something that is not implemented.
    """

    def __init__(self, published: PublishedFormat, config: Mapping[str, Any]) -> None:
        check_keys(config, published.keys, WHERE)
        self.format = published.read(config)
        self._layers = published.layers
        self._unconverted = unconverted_modules(config)

    def get_quant_method(self, layer: WeightedLayer, prefix: str) -> WeightMethod | None:
        """See `QuantizationConfig`."""
        if not isinstance(layer, self._layers) or is_unconverted(prefix, self._unconverted):
            return None
        return stored_as(self.format, layer, prefix)

    def check_all_used(self) -> None:
        """See `QuantizationConfig`; the file's list may name modules without a weight matrix."""


def stored_as(weight_format: WeightFormat, layer: WeightedLayer, prefix: str) -> WeightMethod:
    """The method of a layer whose weights a checkpoint stores in this format.

    Raises:
      ConfigError: The layer's sizes do not fit the format.
    """
    try:
        for slot in layer.weight_slots:
            weight_format.tensors(slot.shape)
    except ValueError as error:
        raise ConfigError(f"{WHERE}: {prefix} {error}") from None
    return WeightMethod(format=weight_format)
