"""What layers ask of quantization: the contract between them and whatever decides how weights are stored.

Model classes written to the model development guides may bring their own methods. Nothing here needs JAX.
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable


class QuantMethod(Protocol):
    """A layer's `quant_method`: makes its parameters, and may rework what was loaded into them."""

    def create_weights(self, layer: Any, rngs: Any, dtype: Any) -> None:
        """Sets the layer's parameters (`layer.weight`, ...), before anything is loaded."""
        ...

    def process_weights_after_loading(self, layer: Any) -> None:
        """Called once for each layer, when the whole checkpoint is read."""
        ...


@runtime_checkable
class HasQuantMethod(Protocol):
    """A layer whose parameters a QuantMethod made; None where the layer has them by itself."""

    @property
    def quant_method(self) -> QuantMethod | None:
        """The method that made them."""
        ...


@runtime_checkable
class ApplyingQuantMethod(QuantMethod, Protocol):
    """A QuantMethod that also multiplies: for parameters other than one `weight` that the kernels know."""

    def apply(self, layer: Any, x: Any, *, preferred_element_type: Any = None) -> Any:
        """x [..., in] -> [..., out] in the type given, or x's, without the bias."""
        ...


class QuantizationConfig(Protocol):
    """Decides how each layer's weights are stored: read from a checkpoint, or what a user asks for."""

    def get_quant_method(self, layer: Any, prefix: str) -> QuantMethod | None:
        """The method for the layer of this dotted name; None leaves it unquantized.

        Raises:
          ConfigError: The layer cannot be quantized as asked for.
        """
        ...

    def check_all_used(self) -> None:
        """Called once the whole model has asked.

        Raises:
          ConfigError: A part of what was asked for was for no layer of the model.
        """
        ...


@runtime_checkable
class PackingQuantizationConfig(QuantizationConfig, Protocol):
    """A QuantizationConfig that also decides for weights which nothing may quantize."""

    @property
    def unquantized(self) -> QuantizationConfig:
        """Decides for them."""
        ...


def without_quantization(config: QuantizationConfig | None) -> QuantizationConfig | None:
    """The configuration for layers that must never be quantized, such as routers."""
    return config.unquantized if isinstance(config, PackingQuantizationConfig) else None
