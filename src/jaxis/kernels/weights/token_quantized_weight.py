"""TokenQuantizedWeight: integers whose products' input is quantized with one scale for each token, as BitNet's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxis.kernels.materialize import materialize
from jaxis.kernels.weights import functions
from jaxis.kernels.weights.coded_weight import CodedWeight
from jaxis.kernels.weights.packed_weight import PackedWeight
from jaxis.kernels.weights.quantized_activations import divide
from jaxis.kernels.weights.wrapped_weight import WrappedWeight

_SMALLEST = 1e-5


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TokenQuantizedWeight(WrappedWeight):
    """A weight [..., out, in] whose products' input is quantized to int8, with one scale for each token.

    Attributes:
      weight: Weight [..., out, in], whose `act_qtype` is "integers".
      scale: float32 [..., 1, 1], multiplies the whole weight.
    """

    weight: CodedWeight | PackedWeight
    scale: jax.Array | np.ndarray

    @property
    def quantizes_input(self) -> bool:
        return True

    def matmul(self, x: jax.Array, preferred_element_type: DTypeLike | None = None) -> jax.Array:
        integers, factor = quantize_tokens(x)
        y = functions.matmul(integers.astype(x.dtype), self.weight, preferred_element_type=jnp.float32)
        return self._scaled(y, factor).astype(preferred_element_type or x.dtype)

    def fused_matmul(
        self,
        x: jax.Array,
        weights: Sequence[TokenQuantizedWeight],
        addends: Sequence[jax.Array] = (),
        factors: Sequence[jax.Array] = (),
    ) -> list[jax.Array] | None:
        integers, factor = quantize_tokens(x)
        products = functions.fused_matmul(integers, [each.weight for each in weights])
        if products is None:
            return None
        results = [each._scaled(y, factor) for each, y in zip(weights, products, strict=True)]
        if addends:
            results = [y + addend for y, addend in zip(results, addends, strict=True)]
        if factors:
            results = [y * each for y, each in zip(results, factors, strict=True)]
        return [y.astype(x.dtype) for y in results]

    def dequantize(self, dtype: DTypeLike = jnp.float32) -> jax.Array:
        return (self.weight.dequantize() * self.scale).astype(dtype)

    def lookup(self, ids: jax.Array, dtype: DTypeLike) -> jax.Array:
        return (self.weight.lookup(ids, jnp.float32) * self.scale).astype(dtype)

    def _scaled(self, y: jax.Array, factor: jax.Array) -> jax.Array:
        return materialize(y * materialize(factor * self.scale[0, 0]))


@jax.custom_jvp
def quantize_tokens(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Quantizes x [..., in] to whole numbers from -127 to 127, float32 [..., in]: x ~ factor * number.

    The factor, float32 [..., 1], is the largest magnitude / 127. The derivative is that of x (straight through).
    """
    x = x.astype(jnp.float32)
    largest = materialize(jnp.maximum(jnp.max(jnp.abs(x), axis=-1, keepdims=True), _SMALLEST))
    return jnp.clip(jnp.rint(x * (127 / largest)), -127, 127), divide(largest, 127)


@quantize_tokens.defjvp
def _quantize_tokens_jvp(
    primals: tuple[jax.Array], tangents: tuple[jax.Array]
) -> tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]:
    integers, factor = quantize_tokens(*primals)
    return (integers, factor), (tangents[0].astype(jnp.float32) / factor, jnp.zeros_like(factor))
