"""Interface of every form of a weight in memory, and the weights of a layer of experts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self, TypeAlias, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxis.kernels.grouped_matmul.stored import StoredStack
from jaxis.kernels.weights.expert_additions import ExpertAdditions
from jaxis.kernels.weights.rows import gather_rows, padded_rows

Allocate: TypeAlias = Callable[[tuple[int, int]], np.ndarray]
"""Allocator of a packed weight's panels: (panels, panel's bytes) -> uint8 array of that shape."""


@runtime_checkable
class Weight(Protocol):
    """A matrix [out, in] in some form, or a stack [..., out, in] of matrices: a pytree of arrays.

    The methods here are for weights that are not packed, do not quantize their input and have no blocks of several
    rows.
    """

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape (..., out, in) of the dequantized weight."""
        ...

    @property
    def storage(self) -> str:
        """Storage of the elements, for people: "bfloat16", "int4", or "4-bit" for codes with levels."""
        ...

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in jax.tree.leaves(self))

    @property
    def packed_nbytes(self) -> int:
        """Number of bytes of a weight [out, in] once it is packed for the native CPU kernels, without padding."""
        return self.nbytes

    @property
    def is_packed(self) -> bool:
        return False

    @property
    def quantizes_input(self) -> bool:
        """True if the input of the weight's products is quantized dynamically, to int8."""
        return False

    @property
    def column_major_arrays(self) -> frozenset[str]:
        """Names of arrays that accelerators read column by column, such as scales; others they read by rows."""
        return frozenset()

    def matmul(self, x: jax.Array, preferred_element_type: DTypeLike | None = None) -> jax.Array:
        """Returns `x @ weight.T`, [..., out], for x [..., in], by XLA or the native kernel; the default type is x's."""
        ...

    def dequantize(self, dtype: DTypeLike = jnp.float32) -> jax.Array:
        """Returns the weight as an array [..., out, in]."""
        ...

    def lookup(self, ids: jax.Array, dtype: DTypeLike) -> jax.Array:
        """Returns rows of a weight [out, in]: ids i32 [T] -> [T, in]; ids out of range are clipped."""
        return jax.tree.map(lambda array: gather_rows(array, ids), self).dequantize(dtype)

    def take_rows(self, rows: np.ndarray) -> Self:
        """Returns the weight [n, in] with the rows int [n], in this order. Raises TypeError if it is packed."""
        return jax.tree.map(lambda array: jnp.take(jnp.asarray(array), rows, axis=0), self)

    def with_rows(self, num_rows: int) -> Self:
        """Returns the weight [num_rows, in]: this one followed by rows of zeros. Raises TypeError if it is packed."""
        return jax.tree.map(lambda array: padded_rows(array, num_rows), self)

    def round_input(self, x: jax.Array) -> jax.Array:
        """Returns x [..., in] as the product rounds it first, in x's type."""
        return x

    def with_quantized_input(self, act_qtype: str) -> Self:
        """Returns the weight with its products' input quantized to this type, if it has integers or codes."""
        return self

    def with_whole_blocks(self, parts: tuple[int, int]) -> Self:
        """Returns the weight [out, in] with blocks that a division of (rows, columns) into `parts` does not cut."""
        return self

    def kernel_stack(self) -> StoredStack | None:
        """Returns a stack [X, out, in] in the form that TPU and GPU kernels read; None if they do not take it."""
        return None

    def pack(self, dtype: DTypeLike = jnp.float32, allocate: Allocate | None = None) -> Weight | None:
        """Returns the weight [out, in] of host arrays, packed for the native CPU kernels; None if they do not take it.

        If the model's type is bfloat16, float weights become bfloat16. `allocate` allocates the panels, which become
        the result's data as they are; None allocates new memory and wraps it in a JAX array.
        """
        ...

    def fused_matmul(
        self,
        x: jax.Array,
        weights: Sequence[Any],
        addends: Sequence[jax.Array] = (),
        factors: Sequence[jax.Array] = (),
    ) -> list[jax.Array] | None:
        """Multiplies x with each of several weights of this form in one kernel; None if there is no such kernel.

        Addends, float32 [..., out] for each weight, are added to the products before rounding. Then factors, of the
        same shapes, multiply the sums, if there are any.
        """
        return None

    def gated_matmul(
        self,
        x: jax.Array,
        up: Any,
        activation: str,
        addends: Sequence[jax.Array] = (),
        factors: Sequence[jax.Array] = (),
    ) -> jax.Array | None:
        """Returns `activation(x @ self.T) * (x @ up.T)` by one kernel; None if no kernel knows this activation.

        Addends and factors are those of `fused_matmul`, for both products.
        """
        return None

    def head_matmul(self, x: jax.Array) -> jax.Array:
        """Returns `x[t, h] @ weight[h].T`, [T, H, out] in x's type, for x [T, H, in] and a stack [H, out, in]."""
        return jnp.einsum("thi,hoi->tho", x, self.dequantize(x.dtype))


WeightValue: TypeAlias = jax.Array | np.ndarray | Weight
"""Value of a parameter: a float array, or another form of a weight."""


class GatedUnit(Protocol):
    """Function that combines an expert's gate and up projections, or transforms the latter if there is no gate."""

    @property
    def has_gate(self) -> bool: ...

    def __call__(self, gate: Any, up: jax.Array) -> jax.Array:
        """Maps gate and up [..., F] to [..., F]; `gate` is None without one."""
        ...

    @property
    def kernel_arguments(self) -> Mapping[str, Any] | None:
        """Unit as arguments of `PackedExperts`; None if the kernel does not support it."""
        ...


@dataclass(frozen=True)
class ExpertStacks:
    """Weights of X experts, and the combination of their products.

    Attributes:
      gate, up, down: [X, F, E], [X, F, E] and [X, E, F]; no gate if experts have none.
      gate_bias, up_bias, down_bias: [X, F], [X, F] and [X, E]; None for no bias.
      gated_unit: Function that combines gate and up into the input of `down`.
      scales_input: True if a token's weight for an expert multiplies the expert's input rather than its output.
      are_spread: True if each device of the mesh has whole experts, and all devices have equally many.
      additions: Additions to the products, whole on every device; None for none.
    """

    gate: WeightValue | None
    up: WeightValue
    down: WeightValue
    gate_bias: jax.Array | None
    up_bias: jax.Array | None
    down_bias: jax.Array | None
    num_experts: int
    gated_unit: GatedUnit
    scales_input: bool
    are_spread: bool = False
    additions: ExpertAdditions | None = None

    @property
    def weights(self) -> tuple[WeightValue | None, WeightValue, WeightValue]:
        return self.gate, self.up, self.down

    @property
    def biases(self) -> tuple[jax.Array | None, jax.Array | None, jax.Array | None]:
        return self.gate_bias, self.up_bias, self.down_bias

    def with_arrays(self, weights: Sequence[Any], biases: Sequence[Any], **others: Any) -> ExpertStacks:
        (gate, up, down), (gate_bias, up_bias, down_bias) = weights, biases
        arrays = {"gate": gate, "up": up, "down": down}
        arrays |= {"gate_bias": gate_bias, "up_bias": up_bias, "down_bias": down_bias}
        return dataclasses.replace(self, **arrays, **others)


Experts: TypeAlias = Callable[[jax.Array, jax.Array, jax.Array, ExpertStacks], jax.Array]
