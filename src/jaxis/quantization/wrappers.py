"""QuantizationConfigs that wrap another one and process its weights further."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from jaxis.config.quantization import QuantizationConfig, QuantMethod
from jaxis.layers.weight_method import WeightedLayer, WeightMethod
from jaxis.quantization.rules import RuleQuantizationConfig


@dataclass(frozen=True)
class Dequantize:
    """Implements `quantization="dequantize"`: a quantized checkpoint is dequantized to the model's data type."""


@dataclass(frozen=True)
class DequantizingConfig:
    """Dequantizes each weight that `inner` loads to the model's type. A QuantizationConfig."""

    inner: QuantizationConfig

    def get_quant_method(self, layer: WeightedLayer, prefix: str) -> QuantMethod | None:
        """See `QuantizationConfig`."""
        method = self.inner.get_quant_method(layer, prefix)
        return dataclasses.replace(method, dequantizes=True) if isinstance(method, WeightMethod) else method

    def check_all_used(self) -> None:
        """See `QuantizationConfig`."""
        self.inner.check_all_used()


@dataclass(frozen=True)
class QuantizedActivationsConfig:
    """Leaves weights as `inner` loads them and quantizes the activations that rules name. A QuantizationConfig.

    Weights that are stored as floats keep the activations that they have: quantizing those would gain nothing.
    """

    inner: QuantizationConfig
    rules: RuleQuantizationConfig

    def get_quant_method(self, layer: WeightedLayer, prefix: str) -> QuantMethod | None:
        """See `QuantizationConfig`."""
        method, rule = self.inner.get_quant_method(layer, prefix), self.rules.find(prefix)
        if rule is None or rule.act_qtype is None or not isinstance(method, WeightMethod):
            return method
        return dataclasses.replace(method, act_qtype=rule.act_qtype)

    def check_all_used(self) -> None:
        """See `QuantizationConfig`."""
        self.inner.check_all_used()
        self.rules.check_all_used()


@dataclass(frozen=True)
class PackingConfig:
    """Packs every weight for the native CPU kernels, after `inner` has loaded or quantized it. A QuantizationConfig."""

    inner: QuantizationConfig | None = None

    @property
    def unquantized(self) -> PackingConfig:
        """See `PackingQuantizationConfig`."""
        return PackingConfig()

    def get_quant_method(self, layer: WeightedLayer, prefix: str) -> QuantMethod | None:
        """See `QuantizationConfig`; a method that is not jaxis' own is left alone."""
        method = None if self.inner is None else self.inner.get_quant_method(layer, prefix)
        if method is None:
            return WeightMethod(packs=True)
        return dataclasses.replace(method, packs=True) if isinstance(method, WeightMethod) else method

    def check_all_used(self) -> None:
        """See `QuantizationConfig`."""
        if self.inner is not None:
            self.inner.check_all_used()
