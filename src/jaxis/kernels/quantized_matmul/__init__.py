"""Products of activations with weights of narrow integers, which stay narrow in memory."""

from __future__ import annotations

from typing import Any

import jax

from jaxis.kernels.quantized_matmul import xla
from jaxis.kernels.quantized_matmul.quantize import quantize
from jaxis.kernels.quantized_matmul.reference import dequantize
from jaxis.kernels.quantized_matmul.weight import QuantizedWeight

__all__ = ["QuantizedWeight", "dequantize", "quantize", "quantized_matmul"]


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
