"""The quantized product as a single XLA matrix product, on any device.

Scales are folded into their factors, so that per-group sums are never materialized: the activation's into the
activation, the weight's into the result if a row has one scale, else into the weight. This rounds differently from
the definition, by about the rounding error of x's type.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxis.kernels.quantized_matmul.reference import dequantize, round_activations
from jaxis.kernels.quantized_matmul.weight import QuantizedWeight


def quantized_matmul(
    x: jax.Array,
    weight: QuantizedWeight,
    *,
    act_qtype: str | None = None,
    preferred_element_type: DTypeLike | None = None,
) -> jax.Array:
    """`x @ dequantize(weight).T`; `reference.quantized_matmul` defines it term by term.

    Args:
      x: [..., in].
      weight: Stands for [out, in].
      act_qtype: "int8" quantizes x dynamically, in groups of features of each row; None does not.
      preferred_element_type: Type of the result; None means x's.

    Returns:
      [..., out].
    """
    out_dtype = preferred_element_type or x.dtype
    if act_qtype is not None:
        x = round_activations(x)
    if weight.qtype == "int8" and weight.scale.shape[1] == 1:
        # int8 is exact in every float type, and XLA upcasts it while reading.
        y = jnp.einsum("...i,oi->...o", x, weight.qvalue.astype(x.dtype), preferred_element_type=jnp.float32)
        return (y * weight.scale[:, 0]).astype(out_dtype)
    return jnp.einsum("...i,oi->...o", x, dequantize(weight, x.dtype), preferred_element_type=out_dtype)
