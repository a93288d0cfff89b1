"""How layers store and apply their weights: as they are, or quantized."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxis.errors import CheckpointError
from jaxis.kernels.quantized_matmul import QuantizedWeight, dequantize, quantize, quantized_matmul
from jaxis.layers.module import initializers_are_skipped, make_parameter
from jaxis.layers.weight_loader import check_loadable, place_array

if TYPE_CHECKING:
    from jaxis.layers.embed import JaxEmbed
    from jaxis.layers.linear import JaxLinear
    from jaxis.quantization.config import LinearMethod


@dataclass(frozen=True)
class WeightScheme:
    """How one layer's weight is quantized, and what its input is.

    Attributes:
      weight_qtype: "int8" or "int4".
      act_qtype: "int8" quantizes the layer's input as it comes; None does not.
      tile_size: Input features that share a scale; None is all of them.
      weight_calibration_method: As for `kernels.quantized_matmul.quantize`.
    """

    weight_qtype: str
    act_qtype: str | None = None
    tile_size: int | None = None
    weight_calibration_method: str = "absmax"


def select_method(layer: JaxLinear | JaxEmbed, scheme: WeightScheme | None) -> LinearMethod:
    """The method of every layer: the one place that chooses among implementations.

    Args:
      layer: Whose sizes are set.
      scheme: How its weight is quantized; None is not at all.
    """
    return UnquantizedLinearMethod() if scheme is None else QuantizedLinearMethod(scheme)


@dataclass(frozen=True)
class UnquantizedLinearMethod:
    """The weight as it stands in the checkpoint: `[out, in]` in the model's data type."""

    def create_weights(self, layer: JaxLinear | JaxEmbed, rngs: nnx.Rngs, dtype: Any) -> None:
        layer.weight = make_parameter(
            rngs, layer.kernel_init, (layer.output_size, layer.input_size), dtype, axes=layer.kernel_axes
        )

    def apply(self, layer: JaxLinear | JaxEmbed, x: jax.Array, *, preferred_element_type: Any = None) -> jax.Array:
        return jnp.einsum("...i,oi->...o", x, layer.weight[...], preferred_element_type=preferred_element_type)

    def lookup(self, layer: JaxEmbed, input_ids: jax.Array) -> jax.Array:
        return jnp.take(layer.weight[...], input_ids, axis=0, mode="clip")

    def process_weights_after_loading(self, layer: JaxLinear | JaxEmbed) -> None:
        """Nothing to repack."""


@dataclass(frozen=True)
class QuantizedLinearMethod:
    """`weight` is a parameter whose value is a QuantizedWeight, quantized from the checkpoint's as it is read."""

    scheme: WeightScheme

    def create_weights(self, layer: JaxLinear | JaxEmbed, rngs: nnx.Rngs, dtype: Any) -> None:
        shape = (layer.output_size, layer.input_size)
        if initializers_are_skipped():
            initial: Any = jnp.zeros(shape, dtype)  # of the shape that the loader is to find
        else:
            initial = self.quantize(np.asarray(layer.kernel_init(rngs.params(), shape, dtype)))
        layer.weight = nnx.Param(initial, logical_axes=layer.kernel_axes, weight_loader=_QuantizingLoader(self))

    def quantize(self, weight: np.ndarray) -> QuantizedWeight:
        """A QuantizedWeight of numpy arrays. Raises ValueError if the weight is not finite."""
        scheme = self.scheme
        return quantize(weight, scheme.weight_qtype, scheme.tile_size, scheme.weight_calibration_method)

    def apply(self, layer: JaxLinear | JaxEmbed, x: jax.Array, *, preferred_element_type: Any = None) -> jax.Array:
        return quantized_matmul(
            x,
            layer.weight.get_value(),
            act_qtype=self.scheme.act_qtype,
            preferred_element_type=preferred_element_type,
        )

    def lookup(self, layer: JaxEmbed, input_ids: jax.Array) -> jax.Array:
        rows = jax.tree.map(lambda array: jnp.take(array, input_ids, axis=0, mode="clip"), layer.weight.get_value())
        return dequantize(rows, layer.dtype)

    def process_weights_after_loading(self, layer: JaxLinear | JaxEmbed) -> None:
        """Nothing to repack."""


@dataclass(frozen=True)
class _QuantizingLoader:
    """A `weight_loader`. Equal for layers alike: what a parameter carries decides which layers share a trace."""

    method: QuantizedLinearMethod

    def __call__(self, param: nnx.Param, tensor: np.ndarray, shard_id: str | int | None = None) -> None:
        check_loadable(param, tensor, shard_id)
        try:
            quantized = self.method.quantize(tensor)
        except ValueError as error:
            raise CheckpointError(str(error)) from None
        param.set_value(place_quantized(quantized, param.get_metadata()["logical_axes"]))


def place_quantized(weight: QuantizedWeight, axes: tuple[str | None, ...]) -> QuantizedWeight:
    """The weight on the current mesh, each of its arrays split as the matrix is."""
    return jax.tree.map(lambda array: place_array(array, axes), weight)
