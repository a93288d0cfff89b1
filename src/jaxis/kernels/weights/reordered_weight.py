from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxis.kernels.weights import functions
from jaxis.kernels.weights.wrapped_weight import WrappedWeight


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ReorderedWeight(WrappedWeight):
    """A weight [..., out, in] whose columns are in a different order from the features that they multiply.

    GPTQ with act-order quantizes columns by their importance: columns of one group are neighbours in that order only.

    Attributes:
      weight: Weight [..., out, in], whose column i multiplies feature `input_order[i]`.
      input_order: int32 [..., 1, in], a permutation. It has as many axes as the other arrays of a weight, so that it is
        stacked and placed like them.
    """

    input_order: jax.Array | np.ndarray

    def matmul(self, x: jax.Array, preferred_element_type: DTypeLike | None = None) -> jax.Array:
        reordered = jnp.take(x, jnp.asarray(self.input_order)[0], axis=-1)
        return functions.matmul(reordered, self.weight, preferred_element_type=preferred_element_type)

    def dequantize(self, dtype: DTypeLike = jnp.float32) -> jax.Array:
        return self._in_order(self.weight.dequantize(dtype))

    def lookup(self, ids: jax.Array, dtype: DTypeLike) -> jax.Array:
        return self._in_order(self.weight.lookup(ids, dtype))

    def with_quantized_input(self, act_qtype: str) -> Self:
        return dataclasses.replace(self, weight=self.weight.with_quantized_input(act_qtype))

    def _in_order(self, columns: jax.Array) -> jax.Array:
        """Puts [..., rows, in] from the order of the weight's columns into that of the features."""
        places = jnp.argsort(jnp.asarray(self.input_order), axis=-1)
        return jnp.take_along_axis(columns, places, axis=-1)
