"""The user's choice to widen a quantized checkpoint while it loads: `quantization="dequantize"`."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxis.kernels.quantized_matmul import dequantize
from jaxis.quantization.experts import STACK_AXES, UnquantizedExpertsMethod
from jaxis.quantization.methods import UnquantizedLinearMethod

if TYPE_CHECKING:
    from jaxis.layers.embed import JaxEmbed
    from jaxis.layers.experts import JaxExperts
    from jaxis.layers.linear import JaxLinear
    from jaxis.quantization.config import ExpertsMethod, LinearMethod, QuantizationConfig


@dataclass(frozen=True)
class Dequantize:
    """What `quantization="dequantize"` asks for: a quantized checkpoint's weights in the model's data type."""


@dataclass(frozen=True)
class DequantizingConfig:
    """A QuantizationConfig that has each weight that `inner` loads widened once it is loaded."""

    inner: QuantizationConfig

    def get_quant_method(self, layer: nnx.Module, prefix: str) -> LinearMethod | ExpertsMethod | None:
        """As QuantizationConfig's."""
        from jaxis.layers.experts import JaxExperts

        method = self.inner.get_quant_method(layer, prefix)
        if method is None:
            return None
        if isinstance(layer, JaxExperts):
            return DequantizedExpertsMethod(method, UnquantizedExpertsMethod())
        return DequantizedLinearMethod(method, UnquantizedLinearMethod())

    def check_all_used(self) -> None:
        """As QuantizationConfig's."""
        self.inner.check_all_used()


@dataclass(frozen=True)
class DequantizedLinearMethod:
    """Loads as `stored` does and then widens the weight, layer by layer.

    Attributes:
      stored: Makes a parameter for each of the file's tensors.
      method: Takes over once the weight is wide.
      dtype: The weight's in the end; set when the parameters are made.
    """

    stored: LinearMethod
    method: LinearMethod
    dtype: Any = None

    def create_weights(self, layer: JaxLinear | JaxEmbed, rngs: nnx.Rngs, dtype: Any) -> None:
        self.stored.create_weights(layer, rngs, dtype)
        layer.quant_method = dataclasses.replace(self, dtype=jnp.dtype(dtype))

    def apply(self, layer: JaxLinear | JaxEmbed, x: jax.Array, *, preferred_element_type: Any = None) -> jax.Array:
        raise NotImplementedError("process_weights_after_loading comes first")

    def lookup(self, layer: JaxEmbed, input_ids: jax.Array) -> jax.Array:
        raise NotImplementedError("process_weights_after_loading comes first")

    def process_weights_after_loading(self, layer: JaxLinear | JaxEmbed) -> None:
        """The file's parameters become a narrow weight, and that a wide one."""
        self.stored.process_weights_after_loading(layer)
        layer.weight.set_value(_dequantize(layer.weight.get_value(), self.dtype))
        layer.quant_method = self.method
        self.method.process_weights_after_loading(layer)


@dataclass(frozen=True)
class DequantizedExpertsMethod:
    """As DequantizedLinearMethod, of a layer of experts, stack by stack."""

    stored: ExpertsMethod
    method: ExpertsMethod
    dtype: Any = None

    def create_weights(self, layer: JaxExperts, rngs: nnx.Rngs, dtype: Any) -> None:
        self.stored.create_weights(layer, rngs, dtype)
        layer.quant_method = dataclasses.replace(self, dtype=jnp.dtype(dtype))

    def load_expert(self, layer: JaxExperts, stack_name: str, expert: int, tensor: np.ndarray) -> None:
        self.stored.load_expert(layer, stack_name, expert, tensor)

    def apply(self, layer: JaxExperts, x: jax.Array, expert_ids: jax.Array, expert_weights: jax.Array) -> jax.Array:
        raise NotImplementedError("process_weights_after_loading comes first")

    def process_weights_after_loading(self, layer: JaxExperts) -> None:
        """The file's parameters become narrow stacks, and those wide ones."""
        self.stored.process_weights_after_loading(layer)
        for name in STACK_AXES:
            param = getattr(layer, name)
            param.set_value(_dequantize(param.get_value(), self.dtype))
        layer.quant_method = self.method
        self.method.process_weights_after_loading(layer)


_dequantize = jax.jit(dequantize, static_argnums=1)
