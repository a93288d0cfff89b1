"""Weights whose columns are in another order than the features that they multiply."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from jaxis.kernels.quantized_matmul.coded import CodedWeight
from jaxis.kernels.quantized_matmul.packed import PackedWeight
from jaxis.kernels.quantized_matmul.weight import QuantizedWeight


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ReorderedWeight:
    """A weight [..., out, in] that `weight` stands for when its columns are put back into the order of the features.

    GPTQ with act-order quantizes columns by their importance: columns of one group are neighbours in that order only.

    Attributes:
      weight: Stands for [..., out, in]; its column i multiplies feature `input_order[i]`.
      input_order: int32 [..., 1, in], a permutation. It has as many axes as the other arrays of a weight, so that it is
        stacked and placed like them.
    """

    weight: QuantizedWeight | CodedWeight | PackedWeight
    input_order: jax.Array | np.ndarray

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape (..., out, in) of the dequantized weight."""
        return self.weight.shape

    @property
    def nbytes(self) -> int:
        """Bytes of all its arrays."""
        return self.weight.nbytes + self.input_order.nbytes


def reorder(x: jax.Array, weight: ReorderedWeight) -> jax.Array:
    """x [..., in] -> its features in the order of the columns of a weight that stands for [out, in]."""
    return jnp.take(x, jnp.asarray(weight.input_order)[0], axis=-1)


def restore_order(columns: jax.Array, weight: ReorderedWeight) -> jax.Array:
    """[..., rows, in] in the order of the weight's columns -> in that of the features."""
    places = jnp.argsort(jnp.asarray(weight.input_order), axis=-1)
    return jnp.take_along_axis(columns, places, axis=-1)
