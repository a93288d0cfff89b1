"""Checkpoints whose `quantization_config` stores all its modules alike, but for those that it names."""

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
    """How config.json asks for a format.

    Attributes:
      read: The format, from the object in config.json; raises ConfigError where that is not as it must be.
      layers: The classes of layers that are stored so.
      keys: The keys that the object may have, with their values; None is any.
      is_meant: Whether an object of the `quant_method` is about this format, where that has several.
    """

    read: Callable[[Mapping[str, Any]], WeightFormat]
    layers: tuple[type, ...]
    keys: Mapping[str, tuple[Any, ...] | None]
    is_meant: Callable[[Mapping[str, Any]], bool] = lambda _: True


class PublishedQuantizationConfig:
    """A `quantization_config` of one format. A QuantizationConfig.

    Args:
      published: Which.
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
        """See `QuantizationConfig`; the file's list may name modules that have no weight matrix."""


def stored_as(weight_format: WeightFormat, layer: WeightedLayer, prefix: str) -> WeightMethod:
    """The method of a layer whose weights a checkpoint stores so.

    Raises:
      ConfigError: The layer's sizes do not allow it.
    """
    try:
        for slot in layer.weight_slots:
            weight_format.tensors(slot.shape)
    except ValueError as error:
        raise ConfigError(f"{WHERE}: {prefix} {error}") from None
    return WeightMethod(format=weight_format)
