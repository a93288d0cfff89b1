"""The user's choice to widen a quantized checkpoint while it loads: `quantization="dequantize"`."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxis.kernels.quantized_matmul import dequantize
from jaxis.quantization.methods import UnquantizedLinearMethod

if TYPE_CHECKING:
    from jaxis.layers.embed import JaxEmbed
    from jaxis.layers.linear import JaxLinear
    from jaxis.quantization.config import LinearMethod, QuantizationConfig


@dataclass(frozen=True)
class Dequantize:
    """What `quantization="dequantize"` asks for: a quantized checkpoint's weights in the model's data type."""


@dataclass(frozen=True)
class DequantizingConfig:
    """A QuantizationConfig that has each weight that `inner` loads widened once it is loaded."""

    inner: QuantizationConfig

    def get_quant_method(self, layer: nnx.Module, prefix: str) -> LinearMethod | None:
        """As QuantizationConfig's."""
        method = self.inner.get_quant_method(layer, prefix)
        return None if method is None else DequantizedLinearMethod(method, UnquantizedLinearMethod())

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
        wide = _dequantize(layer.weight.get_value(), self.dtype)
        layer.weight = nnx.Param(wide, logical_axes=layer.kernel_axes)
        layer.quant_method = self.method
        self.method.process_weights_after_loading(layer)


_dequantize = jax.jit(dequantize, static_argnums=1)
