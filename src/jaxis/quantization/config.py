"""Which layer computes how: the seam through which quantized weights enter.

A `QuantizationConfig` is asked for a method for each linear layer; the method creates the layer's parameters under the
checkpoint's names, applies the product, and may repack the weights once they are loaded. Without a quantization
config, layers use `UnquantizedLinearMethod`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from jaxis.layers.module import make_parameter

if TYPE_CHECKING:
    from jaxis.layers.linear import JaxLinear


class LinearMethod(Protocol):
    """How a linear layer stores its weight and applies it."""

    def create_weights(self, layer: JaxLinear, rngs: nnx.Rngs, dtype: Any) -> None:
        """Sets the layer's parameters (`layer.weight`, scales, ...)."""

    def apply(self, layer: JaxLinear, x: jax.Array, *, preferred_element_type: Any = None) -> jax.Array:
        """x [..., in] -> [..., out] in the type given, or x's, without the bias."""

    def process_weights_after_loading(self, layer: JaxLinear) -> None:
        """Repacks the loaded weights where that makes the product faster."""


class QuantizationConfig(Protocol):
    """One quantization scheme, read from a checkpoint's `quantization_config` or from a user's rules."""

    def get_quant_method(self, layer: nnx.Module, prefix: str) -> LinearMethod | None:
        """The method for the layer of this dotted name; None leaves it unquantized."""


@dataclass(frozen=True)
class UnquantizedLinearMethod:
    """The weight as it stands in the checkpoint: `[out, in]` in the model's data type."""

    def create_weights(self, layer: JaxLinear, rngs: nnx.Rngs, dtype: Any) -> None:
        layer.weight = make_parameter(
            rngs, layer.kernel_init, (layer.output_size, layer.input_size), dtype, axes=layer.kernel_axes
        )

    def apply(self, layer: JaxLinear, x: jax.Array, *, preferred_element_type: Any = None) -> jax.Array:
        return jnp.einsum("...i,oi->...o", x, layer.weight[...], preferred_element_type=preferred_element_type)

    def process_weights_after_loading(self, layer: JaxLinear) -> None:
        """Nothing to repack."""
