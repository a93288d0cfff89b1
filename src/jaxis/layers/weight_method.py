"""`quant_method` of jaxis' own layers, and its choice for a layer."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from jaxis.config.quantization import HasQuantMethod, QuantizationConfig, QuantMethod
from jaxis.kernels.weights import WeightScheme, WeightValue, can_pack_experts
from jaxis.layers.module import Initializer
from jaxis.layers.partial_weight import WeightLoader
from jaxis.layers.weight_format import WeightFormat, WeightSlot
from jaxis.layers.weight_recipe import WeightRecipe


class WeightedLayer(Protocol):
    """A layer whose weights a WeightMethod can create."""

    kernel_init: Initializer

    @property
    def weight_slots(self) -> Sequence[WeightSlot]:
        """Parameters that hold the layer's weights."""
        ...

    @property
    def can_be_packed(self) -> bool:
        """True if the native kernels support the layer's computation with its weights."""
        ...


@dataclass(frozen=True)
class WeightMethod(WeightRecipe):
    """A QuantMethod whose parameters build their weights by a recipe, each as soon as its tensors have arrived.

    Attributes:
      formats: Formats, by the slot's name, of slots with a format other than `format`.
    """

    formats: Mapping[str, WeightFormat] = field(default_factory=dict, compare=False)

    def create_weights(self, layer: WeightedLayer, rngs: nnx.Rngs, dtype: DTypeLike) -> None:
        """Sets the parameters named by the layer's `weight_slots`."""
        slots = layer.weight_slots
        packs = self.packs and layer.can_be_packed and self._packs_stacks(slots, dtype)
        for slot in slots:
            recipe = dataclasses.replace(self, format=self._format(slot), packs=packs)
            loader = WeightLoader(recipe, slot, np.dtype(dtype))
            setattr(layer, slot.name, loader.make_parameter(rngs, layer.kernel_init))

    def process_weights_after_loading(self, layer: WeightedLayer) -> None:
        """Does nothing: a weight is complete when its last tensor has arrived."""

    def _format(self, slot: WeightSlot) -> WeightFormat:
        return self.formats.get(slot.name, self.format)

    def _packs_stacks(self, slots: Sequence[WeightSlot], dtype: DTypeLike) -> bool:
        """Returns whether one kernel can run the layer of experts, if these slots are stacks: all of it, or nothing."""
        stacks = [slot for slot in slots if slot.num_experts is not None]
        if self.dequantizes or not stacks:
            return True
        return can_pack_experts([self._example(slot, dtype) for slot in stacks])

    def _example(self, slot: WeightSlot, dtype: DTypeLike) -> WeightValue:
        """Returns a one-row weight, otherwise like the slot's."""
        return dataclasses.replace(self, format=self._format(slot)).example((1, slot.shape[1]), dtype)


def create_weights(
    layer: WeightedLayer, quant_config: QuantizationConfig | None, prefix: str, rngs: nnx.Rngs, dtype: DTypeLike
) -> QuantMethod:
    """Creates a layer's parameters by its quantization config, and returns its `quant_method`."""
    method = None if quant_config is None else quant_config.get_quant_method(layer, prefix)
    method = WeightMethod() if method is None else method
    method.create_weights(layer, rngs, dtype)
    return method


def scheme_of_module(module: object) -> WeightScheme | None:
    """Returns the scheme by which jaxis quantizes a module's weights; None if it leaves them as they are."""
    method = module.quant_method if isinstance(module, HasQuantMethod) else None
    return method.scheme if isinstance(method, WeightMethod) else None
