"""Products of activations with narrow weights, which stay narrow in memory."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxis.kernels.quantized_matmul import reference, xla
from jaxis.kernels.quantized_matmul.block_scaled import BlockScaledWeight, block_scaled_matmul, dequantize_blocks
from jaxis.kernels.quantized_matmul.quantize import quantize
from jaxis.kernels.quantized_matmul.weight import QuantizedWeight

__all__ = ["BlockScaledWeight", "QuantizedWeight", "block_scaled_matmul", "dequantize", "quantize", "quantized_matmul"]


def dequantize(weight: QuantizedWeight | BlockScaledWeight, dtype: Any = jnp.float32) -> jax.Array:
    """The weight [out, in] that the narrow numbers stand for."""
    if isinstance(weight, BlockScaledWeight):
        return dequantize_blocks(weight, dtype)
    return reference.dequantize(weight, dtype)


def quantized_matmul(
    x: jax.Array, weight: QuantizedWeight, *, act_qtype: str | None = None, preferred_element_type: Any = None
) -> jax.Array:
    """`x @ dequantize(weight).T`; `reference.quantized_matmul` defines it term by term.

    Args:
      x: [..., in].
      weight: Of [out, in].
      act_qtype: "int8" quantizes x on the way, a scale for each row and group; None leaves it as it is.
      preferred_element_type: Of the result; None is x's.

    Returns:
      [..., out].
    """
    return xla.quantized_matmul(x, weight, act_qtype=act_qtype, preferred_element_type=preferred_element_type)
