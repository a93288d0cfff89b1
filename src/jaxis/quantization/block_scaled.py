"""Linear layers whose weights a checkpoint holds as narrow floats with a scale for each block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax import nnx

from jaxis.errors import CheckpointError
from jaxis.kernels.quantized_matmul import BlockScaledWeight, block_scaled_matmul
from jaxis.kernels.quantized_matmul.block_scaled import scale_shape
from jaxis.quantization.stored import SCALE_DTYPES, stored_parameter

if TYPE_CHECKING:
    from jaxis.layers.embed import JaxEmbed
    from jaxis.layers.linear import JaxLinear
    from jaxis.quantization.config import LinearMethod

BLOCK_SCALE_DTYPES = (*SCALE_DTYPES, np.dtype(ml_dtypes.float8_e8m0fnu))


@dataclass(frozen=True)
class BlockScaledLinearMethod:
    """`weight` is a parameter whose value is a BlockScaledWeight; plain JAX widens it in the product."""

    def create_weights(self, layer: JaxLinear | JaxEmbed, rngs: nnx.Rngs, dtype: Any) -> None:
        raise NotImplementedError("only a checkpoint has such weights: see StoredBlocksMethod")

    def apply(self, layer: JaxLinear | JaxEmbed, x: jax.Array, *, preferred_element_type: Any = None) -> jax.Array:
        return block_scaled_matmul(x, layer.weight.get_value(), preferred_element_type=preferred_element_type)

    def lookup(self, layer: JaxEmbed, input_ids: jax.Array) -> jax.Array:
        raise NotImplementedError("no checkpoint has such embeddings")

    def process_weights_after_loading(self, layer: JaxLinear | JaxEmbed) -> None:
        """Nothing to repack."""


@dataclass(frozen=True)
class StoredBlocksMethod:
    """Has a parameter for each of the file's tensors; once they are loaded, `weight` is one BlockScaledWeight.

    The file has `weight` float8_e4m3fn [out, in] and a scale for each block, by which a value is multiplied.

    Attributes:
      block_shape: (rows, columns) of a block.
      scale_name: The scales' name in the file.
      method: Takes over once they are loaded.
    """

    block_shape: tuple[int, int]
    scale_name: str
    method: LinearMethod

    def create_weights(self, layer: JaxLinear | JaxEmbed, rngs: nnx.Rngs, dtype: Any) -> None:
        shape = (layer.output_size, layer.input_size)
        layer.weight = stored_parameter(shape, [ml_dtypes.float8_e4m3fn], layer.kernel_axes)
        scale = stored_parameter(scale_shape(shape, self.block_shape), BLOCK_SCALE_DTYPES, layer.kernel_axes)
        setattr(layer, self.scale_name, scale)

    def apply(self, layer: JaxLinear | JaxEmbed, x: jax.Array, *, preferred_element_type: Any = None) -> jax.Array:
        raise NotImplementedError("process_weights_after_loading comes first")

    def lookup(self, layer: JaxEmbed, input_ids: jax.Array) -> jax.Array:
        raise NotImplementedError("process_weights_after_loading comes first")

    def process_weights_after_loading(self, layer: JaxLinear | JaxEmbed) -> None:
        """Puts a BlockScaledWeight in the place of the file's parameters and hands the layer over."""
        weight = BlockScaledWeight(
            layer.weight.get_value(), getattr(layer, self.scale_name).get_value(), self.block_shape
        )
        check_finite(weight)
        delattr(layer, self.scale_name)
        layer.weight = nnx.Param(weight, logical_axes=layer.kernel_axes)
        layer.quant_method = self.method
        self.method.process_weights_after_loading(layer)


def check_finite(weight: BlockScaledWeight, name: str = "weight") -> None:
    """Raises CheckpointError where a value or a scale is a NaN or infinite; e2m1 has neither."""
    if not _is_finite(weight):
        raise CheckpointError(f"has a {name} whose values or scales are not all finite")


@jax.jit
def _is_finite(weight: BlockScaledWeight) -> jax.Array:
    finite = jnp.isfinite(weight.scale.astype(jnp.float32)).all()
    if weight.qtype == "float8_e4m3fn":
        finite &= jnp.isfinite(weight.value.astype(jnp.float32)).all()
    return finite
