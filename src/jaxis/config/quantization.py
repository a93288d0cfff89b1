"""Interfaces between layers and the configurations that decide how weights are stored.

Model classes written to the model development guides may bring their own methods. Nothing here needs JAX.
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable


class QuantMethod(Protocol):
    """A layer's `quant_method`: creates its parameters, and may process loaded ones."""

    def create_weights(self, layer: Any, rngs: Any, dtype: Any) -> None:
        """Sets the layer's parameters (`layer.weight`, ...), before anything is loaded."""
        ...

    def process_weights_after_loading(self, layer: Any) -> None:
        """Called once for each layer, after the whole checkpoint is read."""
        ...


@runtime_checkable
class HasQuantMethod(Protocol):
    """A layer whose parameters a QuantMethod created; None where the layer has them by itself."""

    @property
    def quant_method(self) -> QuantMethod | None: ...


@runtime_checkable
class ApplyingQuantMethod(QuantMethod, Protocol):
    """A QuantMethod that also multiplies: for parameters other than one `weight` that the kernels know."""

    def apply(self, layer: Any, x: Any, *, preferred_element_type: Any = None) -> Any:
        """Multiplies x [..., in] -> [..., out] in the given type, or x's, without the bias."""
        ...


class QuantizationConfig(Protocol):
    """Decides how each layer's weights are stored, by a checkpoint or by the user's choice."""

    def get_quant_method(self, layer: Any, prefix: str) -> QuantMethod | None:
        """Returns the method for the layer of this dotted name; None leaves it unquantized.

        Raises ConfigError if the layer cannot be quantized as asked for.
        """
        ...

    def check_all_used(self) -> None:
        """Called once, after the whole model has asked for its methods.

        Raises ConfigError if a part of the configuration is for no layer of the model.
        """
        ...


@runtime_checkable
class KeepsFloats(QuantizationConfig, Protocol):
    """A QuantizationConfig that also decides how layers load weights that must not stay quantized."""

    @property
    def unquantized(self) -> QuantizationConfig | None:
        """Returns the configuration of these layers; None loads their weights as they are."""
        ...


def without_quantization(config: QuantizationConfig | None) -> QuantizationConfig | None:
    """Returns the configuration for layers that must not be quantized, such as routers: it dequantizes."""
    return config.unquantized if isinstance(config, KeepsFloats) else None


@runtime_checkable
class HoldsWeights(QuantizationConfig, Protocol):
    """A QuantizationConfig that also has the weights of the model, as they lie in memory."""

    weight_bytes: int

    def fill(self, model: Any) -> None:
        """Gives each parameter of an abstract model its value. Raises CheckpointError if they do not fit."""
        ...


@runtime_checkable
class NamesTensors(QuantizationConfig, Protocol):
    """A QuantizationConfig of checkpoints that name tensors in several ways, or have unused ones."""

    def tensor_name(self, name: str) -> str | None:
        """Returns a layer's name for a tensor in the file; None if the tensor is not used."""
        ...


def name_of_tensor(config: QuantizationConfig | None, name: str) -> str | None:
    """Returns a layer's name for a tensor in the file; None if it is not used. Most configurations keep the name."""
    return config.tensor_name(name) if isinstance(config, NamesTensors) else name


@runtime_checkable
class RestoresTensors(QuantizationConfig, Protocol):
    """A QuantizationConfig of checkpoints that also quantize parameters that are not the weights of layers."""

    def restored(self, name: str, tensor: Any) -> Any:
        """Returns a tensor of the file as its parameter has it, or rows of a table that a program has read."""
        ...


def restored_tensor(config: QuantizationConfig | None, name: str, tensor: Any) -> Any:
    """Returns a tensor of the file as layers read it. Most configurations have it so."""
    return config.restored(name, tensor) if isinstance(config, RestoresTensors) else tensor
