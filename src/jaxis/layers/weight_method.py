"""The `quant_method` of jaxis' own layers, and how a layer gets one."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from jaxis.config.quantization import QuantizationConfig, QuantMethod
from jaxis.kernels.weights import PackedWeight, Weight
from jaxis.layers.module import Initializer
from jaxis.layers.partial_weight import WeightLoader
from jaxis.layers.weight_format import WeightSlot
from jaxis.layers.weight_recipe import WeightRecipe


class WeightedLayer(Protocol):
    """A layer whose weights a WeightMethod can create."""

    kernel_init: Initializer

    @property
    def weight_slots(self) -> Sequence[WeightSlot]:
        """The parameters that hold its weights."""
        ...

    @property
    def can_be_packed(self) -> bool:
        """Whether the native kernels support what the layer computes with its weights."""
        ...


@dataclass(frozen=True)
class WeightMethod(WeightRecipe):
    """A QuantMethod whose parameters build their weights by a recipe, each as soon as its tensors have arrived."""

    def create_weights(self, layer: WeightedLayer, rngs: nnx.Rngs, dtype: DTypeLike) -> None:
        """Sets the parameters named by the layer's `weight_slots`."""
        slots = layer.weight_slots
        recipe = dataclasses.replace(
            self, packs=self.packs and layer.can_be_packed and self._packs_stacks(slots, dtype)
        )
        for slot in slots:
            loader = WeightLoader(recipe, slot, np.dtype(dtype))
            setattr(layer, slot.name, loader.make_parameter(rngs, layer.kernel_init))

    def process_weights_after_loading(self, layer: WeightedLayer) -> None:
        """Does nothing: a weight is complete when its last tensor has arrived."""

    def _packs_stacks(self, slots: Sequence[WeightSlot], dtype: DTypeLike) -> bool:
        """Whether the kernels take every stack: the kernel runs a whole layer of experts or nothing."""
        return self.dequantizes or all(
            isinstance(self._example(slot, dtype), PackedWeight) for slot in slots if slot.num_experts is not None
        )

    def _example(self, slot: WeightSlot, dtype: DTypeLike) -> Weight:
        """A one-row weight, otherwise like the slot's."""
        shape = (1, slot.shape[1])
        tensors = {name: spec.example() for name, spec in self.format.tensors(shape).items()}
        return self.make(tensors, shape, dtype, lambda panels: np.empty(panels, np.uint8))


def create_weights(
    layer: WeightedLayer, quant_config: QuantizationConfig | None, prefix: str, rngs: nnx.Rngs, dtype: DTypeLike
) -> QuantMethod:
    """Creates a layer's parameters as its quantization config says, and returns its `quant_method`."""
    method = None if quant_config is None else quant_config.get_quant_method(layer, prefix)
    method = WeightMethod() if method is None else method
    method.create_weights(layer, rngs, dtype)
    return method
