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
class KeepsFloats(QuantizationConfig, Protocol):
    """A QuantizationConfig that also decides how layers load whose weights must not stay quantized."""

    @property
    def unquantized(self) -> QuantizationConfig | None:
        """Decides for them; None loads their weights as they are."""
        ...


def without_quantization(config: QuantizationConfig | None) -> QuantizationConfig | None:
    """The configuration for layers that must not be quantized, such as routers: a quantized file is dequantized."""
    return config.unquantized if isinstance(config, KeepsFloats) else None


@runtime_checkable
class NamesTensors(QuantizationConfig, Protocol):
    """A QuantizationConfig of checkpoints that name tensors in several ways, or have some that nothing here uses."""

    def tensor_name(self, name: str) -> str | None:
        """A tensor's name in the file -> the one by which a layer takes it; None if it is not used."""
        ...


def name_of_tensor(config: QuantizationConfig | None, name: str) -> str | None:
    """See `NamesTensors.tensor_name`; other configurations leave names as they are."""
    return config.tensor_name(name) if isinstance(config, NamesTensors) else name
