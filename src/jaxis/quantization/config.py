"""Which layer computes how: the seam through which quantized weights enter.

A `QuantizationConfig` is asked for a method for each layer that has a weight matrix; the method creates the layer's
parameters, applies the product, and may repack the weights once they are loaded. `methods.select_method` decides which
methods there are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import jax
import numpy as np
from flax import nnx

if TYPE_CHECKING:
    from jaxis.layers.embed import JaxEmbed
    from jaxis.layers.experts import JaxExperts
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


class ExpertsMethod(Protocol):
    """How a layer of X experts stores its stacks and applies them."""

    def create_weights(self, layer: JaxExperts, rngs: nnx.Rngs, dtype: Any) -> None:
        """Sets the layer's stacks (`layer.gate_proj`, `layer.up_proj`, `layer.down_proj`, scales, ...)."""

    def load_expert(self, layer: JaxExperts, stack_name: str, expert: int, tensor: np.ndarray) -> None:
        """Puts an expert's tensor, [out, in] for a weight, into its stack.

        Raises:
          CheckpointError: Its shape is not that of the stack's entries, or the expert is there already.
        """

    def apply(self, layer: JaxExperts, x: jax.Array, expert_ids: jax.Array, expert_weights: jax.Array) -> jax.Array:
        """x [T, E], expert_ids i32 [T, k], expert_weights float32 [T, k] -> [T, E], biases included.

        No token is dropped, and what a token gets does not depend on the others.
        """

    def process_weights_after_loading(self, layer: JaxExperts) -> None:
        """Repacks the loaded weights where that makes the product faster."""


class QuantizationConfig(Protocol):
    """One quantization scheme, read from a checkpoint's `quantization_config` or from a user's rules."""

    def get_quant_method(self, layer: nnx.Module, prefix: str) -> LinearMethod | ExpertsMethod | None:
        """The method for the layer of this dotted name; None leaves it unquantized.

        Raises:
          ConfigError: The layer cannot be quantized as the scheme says.
        """

    def check_all_used(self) -> None:
        """Called once the whole model has asked.

        Raises:
          ConfigError: A part of the scheme was for no layer of the model.
        """


def without_quantization(config: QuantizationConfig | None) -> QuantizationConfig | None:
    """What decides for layers that no scheme may quantize, such as routers.

    That is the config's attribute `unquantized`, for those that also choose kernels; None for others.
    """
    return getattr(config, "unquantized", None)
