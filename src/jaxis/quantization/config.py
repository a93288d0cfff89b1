"""Which layer computes how: the seam through which quantized weights enter.

A `QuantizationConfig` is asked for a method for each layer that has a weight matrix; the method creates the layer's
parameters, applies the product, and may repack the weights once they are loaded. `methods.select_method` decides which
methods there are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import jax
from flax import nnx

if TYPE_CHECKING:
    from jaxis.layers.embed import JaxEmbed
    from jaxis.layers.linear import JaxLinear


class LinearMethod(Protocol):
    """How a linear layer, or a table of embeddings, stores its weight [out, in] and applies it."""

    def create_weights(self, layer: JaxLinear | JaxEmbed, rngs: nnx.Rngs, dtype: Any) -> None:
        """Sets the layer's parameters (`layer.weight`, scales, ...)."""

    def apply(self, layer: JaxLinear | JaxEmbed, x: jax.Array, *, preferred_element_type: Any = None) -> jax.Array:
        """x [..., in] -> [..., out] in the type given, or x's, without the bias."""

    def lookup(self, layer: JaxEmbed, input_ids: jax.Array) -> jax.Array:
        """input_ids [T] -> those rows of the weight, [T, in], in the layer's type; an id past an end is the end."""

    def process_weights_after_loading(self, layer: JaxLinear | JaxEmbed) -> None:
        """Repacks the loaded weights where that makes the product faster."""


class QuantizationConfig(Protocol):
    """One quantization scheme, read from a checkpoint's `quantization_config` or from a user's rules."""

    def get_quant_method(self, layer: nnx.Module, prefix: str) -> LinearMethod | None:
        """The method for the layer of this dotted name; None leaves it unquantized.

        Raises:
          ConfigError: The layer cannot be quantized as the scheme says.
        """

    def check_all_used(self) -> None:
        """Called once the whole model has asked.

        Raises:
          ConfigError: A part of the scheme was for no layer of the model.
        """
