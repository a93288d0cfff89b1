"""QuantizationConfigs that wrap another one and process its weights further."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from jaxis.config.quantization import (
    QuantizationConfig,
    QuantMethod,
    name_of_tensor,
    restored_tensor,
    without_quantization,
)
from jaxis.layers.weight_method import WeightedLayer, WeightMethod
from jaxis.quantization.rules import RuleQuantizationConfig


@dataclass(frozen=True)
class Dequantize:
    """Implements `quantization="dequantize"`: a quantized checkpoint is dequantized to the model's data type."""


class _Wrapper:
    """Base class that leaves to `inner` everything that a wrapper does not change."""

    inner: QuantizationConfig | None

    @property
    def unquantized(self) -> QuantizationConfig | None:
        return without_quantization(self.inner)

    def tensor_name(self, name: str) -> str | None:
        return name_of_tensor(self.inner, name)

    def restored(self, name: str, tensor: Any) -> Any:
        return restored_tensor(self.inner, name, tensor)

    def check_all_used(self) -> None:
        if self.inner is not None:
            self.inner.check_all_used()


@dataclass(frozen=True)
class DequantizingConfig(_Wrapper):
    """Dequantizes each weight that `inner` loads to the model's type. A QuantizationConfig."""

    inner: QuantizationConfig

    def get_quant_method(self, layer: WeightedLayer, prefix: str) -> QuantMethod | None:
        method = self.inner.get_quant_method(layer, prefix)
        return dataclasses.replace(method, dequantizes=True) if isinstance(method, WeightMethod) else method


@dataclass(frozen=True)
class QuantizedActivationsConfig(_Wrapper):
    """Leaves weights as `inner` loads them and quantizes the activations that rules name. A QuantizationConfig.

    Weights that are stored as floats keep their activations: quantizing those would gain nothing.
    """

    inner: QuantizationConfig
    rules: RuleQuantizationConfig

    def get_quant_method(self, layer: WeightedLayer, prefix: str) -> QuantMethod | None:
        method, rule = self.inner.get_quant_method(layer, prefix), self.rules.find(prefix)
        if rule is None or rule.act_qtype is None or not isinstance(method, WeightMethod):
            return method
        return dataclasses.replace(method, act_qtype=rule.act_qtype)

    def check_all_used(self) -> None:
        super().check_all_used()
        self.rules.check_all_used()


@dataclass(frozen=True)
class PackingConfig(_Wrapper):
    """Packs every weight for the native CPU kernels, after `inner` has loaded or quantized it. A QuantizationConfig."""

    inner: QuantizationConfig | None = None

    @property
    def unquantized(self) -> PackingConfig:
        return PackingConfig(super().unquantized)

    def get_quant_method(self, layer: WeightedLayer, prefix: str) -> QuantMethod | None:
        """Returns a method that packs; a method that is not jaxis' own is not wrapped."""
        method = None if self.inner is None else self.inner.get_quant_method(layer, prefix)
        if method is None:
            return WeightMethod(packs=True)
        return dataclasses.replace(method, packs=True) if isinstance(method, WeightMethod) else method
