from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.typing import DTypeLike

from jaxis.kernels.grouped_matmul.stored import StoredStack
from jaxis.kernels.weights import packed_weight
from jaxis.kernels.weights.rows import gather_rows
from jaxis.kernels.weights.weight import Allocate, Weight, WeightValue


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class FloatWeight(Weight):
    """A float array [..., out, in] with the operations of a weight; a ShapeDtypeStruct in a model without arrays.

    Parameters hold the array itself, as in any model. `as_weight` wraps it for the duration of an operation.
    """

    array: jax.Array | np.ndarray

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    @property
    def storage(self) -> str:
        return str(self.array.dtype)

    def matmul(self, x: jax.Array, preferred_element_type: DTypeLike | None = None) -> jax.Array:
        return jnp.einsum("...i,oi->...o", x, self.array, preferred_element_type=preferred_element_type)

    def dequantize(self, dtype: DTypeLike = jnp.float32) -> jax.Array:
        return jnp.asarray(self.array).astype(dtype)

    def lookup(self, ids: jax.Array, dtype: DTypeLike) -> jax.Array:
        return gather_rows(self.array, ids).astype(dtype)

    def kernel_stack(self) -> StoredStack:
        return StoredStack(cast(jax.Array, self.array))

    def pack(self, dtype: DTypeLike = jnp.float32, allocate: Allocate | None = None) -> packed_weight.PackedWeight:
        array = np.asarray(self.array)
        # For a float32 model, bfloat16 weights stay bfloat16; the kernels upcast them in registers.
        return packed_weight.pack(array.astype(dtype, copy=False) if dtype == ml_dtypes.bfloat16 else array, allocate)

    def head_matmul(self, x: jax.Array) -> jax.Array:
        return jnp.einsum("thi,hoi->tho", x, self.array)


def as_weight(value: WeightValue) -> Weight:
    """Returns a parameter's value with the operations of a weight. Raises TypeError if it is not a weight."""
    if isinstance(value, jax.Array | np.ndarray | jax.ShapeDtypeStruct):
        return FloatWeight(cast(jax.Array, value))
    # The instance check of a protocol asks for each of its members.
    if Weight in type(value).__mro__ or isinstance(value, Weight):
        return value
    raise TypeError(f"{type(value).__name__} is not a type of weight: see kernels/weights/weight.py")


def as_value(weight: Weight) -> WeightValue:
    """Inverts `as_weight`: returns the value that a parameter holds."""
    return weight.array if isinstance(weight, FloatWeight) else weight
