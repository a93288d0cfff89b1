"""What every form of a weight in memory can do, and what a layer of experts consists of."""

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
"""Memory for a packed weight's panels: (panels, panel's bytes) -> uint8 array of that shape."""


@runtime_checkable
class Weight(Protocol):
    """A matrix [out, in] in some form, or a stack [..., out, in] of matrices: a pytree of arrays.

    Each form is a class of its own that inherits from this one. The methods here hold for weights without any of the
    properties that they ask about: that are not packed, do not quantize their input and have no blocks of several rows.
    """

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape (..., out, in) of the dequantized weight."""
        ...

    @property
    def storage(self) -> str:
        """What its elements are stored as, for people: "bfloat16", "int4", or "4-bit" for codes with levels."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes of all its arrays."""
        return sum(array.nbytes for array in jax.tree.leaves(self))

    @property
    def packed_nbytes(self) -> int:
        """Bytes of a weight [out, in] once it is packed for the native CPU kernels, without padding."""
        return self.nbytes

    @property
    def is_packed(self) -> bool:
        """Whether it is packed for the native CPU kernels."""
        return False

    @property
    def quantizes_input(self) -> bool:
        """Whether the input of its products is quantized dynamically, to int8."""
        return False

    @property
    def column_major_arrays(self) -> frozenset[str]:
        """Names of its arrays that accelerators read column by column, such as scales; others they read by rows."""
        return frozenset()

    def matmul(self, x: jax.Array, preferred_element_type: DTypeLike | None = None) -> jax.Array:
        """`x @ weight.T` as XLA, or for packed weights the native kernel, computes it.

        Args:
          x: [..., in].
          preferred_element_type: Type of the result; None means x's.

        Returns:
          [..., out].
        """
        ...

    def dequantize(self, dtype: DTypeLike = jnp.float32) -> jax.Array:
        """The weight as an array [..., out, in]."""
        ...

    def lookup(self, ids: jax.Array, dtype: DTypeLike) -> jax.Array:
        """Rows of a weight [out, in]: ids i32 [T] -> [T, in]; ids out of range are clipped."""
        return jax.tree.map(lambda array: gather_rows(array, ids), self).dequantize(dtype)

    def take_rows(self, rows: np.ndarray) -> Self:
        """The weight [n, in] whose outputs are these, int [n], of a weight [out, in], in this order.

        Raises:
          TypeError: The weight is packed.
        """
        return jax.tree.map(lambda array: jnp.take(jnp.asarray(array), rows, axis=0), self)

    def with_rows(self, num_rows: int) -> Self:
        """The weight [num_rows, in] of a weight [out, in], with rows of zeros after its own.

        Raises:
          TypeError: The weight is packed.
        """
        return jax.tree.map(lambda array: padded_rows(array, num_rows), self)

    def round_input(self, x: jax.Array) -> jax.Array:
        """x [..., in] as the product rounds it first, in x's type."""
        return x

    def with_quantized_input(self, act_qtype: str) -> Self:
        """The weight with the input of its products quantized to this type, if it consists of integers or codes."""
        return self

    def with_whole_blocks(self, parts: tuple[int, int]) -> Self:
        """The weight [out, in] with blocks that as many equal parts of its rows, and of its columns, do not cut."""
        return self

    def kernel_stack(self) -> StoredStack | None:
        """A stack [X, out, in] as TPU and GPU kernels read it; None if they do not take this form."""
        return None

    def pack(self, dtype: DTypeLike = jnp.float32, allocate: Allocate | None = None) -> Weight | None:
        """The weight [out, in] of host arrays, packed for the native CPU kernels.

        Args:
          dtype: The model's type. Float weights become bfloat16 if this is bfloat16.
          allocate: Allocates the panels, which become the result's data as they are. None allocates new memory and
            wraps it in a JAX array.

        Returns:
          None if the kernels do not take it.
        """
        ...

    def fused_matmul(
        self,
        x: jax.Array,
        weights: Sequence[Any],
        addends: Sequence[jax.Array] = (),
        factors: Sequence[jax.Array] = (),
    ) -> list[jax.Array] | None:
        """`matmul` with each of several weights of this form in one kernel; None if there is none for them.

        Addends, float32 [..., out] for each, are added to the products before these are rounded; then the sums are
        multiplied by factors, of the same shapes, if there are any.
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
        """`activation(x @ self.T) * (x @ up.T)` in one kernel, which knows the activation by this name; else None.

        Addends, float32 [..., out] for both products, are added to these first; then the sums are multiplied by
        factors, of the same shapes, if there are any.
        """
        return None

    def head_matmul(self, x: jax.Array) -> jax.Array:
        """`x[t, h] @ weight[h].T` for x [T, H, in] and a stack [H, out, in] -> [T, H, out] in x's type."""
        return jnp.einsum("thi,hoi->tho", x, self.dequantize(x.dtype))


WeightValue: TypeAlias = jax.Array | np.ndarray | Weight
"""What a parameter holds: a float array, or another form of a weight."""


class GatedUnit(Protocol):
    """How an expert combines its gate and up projections, or what it does with the latter if it has no gate."""

    @property
    def has_gate(self) -> bool:
        """Whether the experts have a gate."""
        ...

    def __call__(self, gate: Any, up: jax.Array) -> jax.Array:
        """gate, up [..., F] -> [..., F]; `gate` is None without one."""
        ...

    @property
    def kernel_arguments(self) -> Mapping[str, Any] | None:
        """The unit as arguments of `PackedExperts`; None if the kernel does not support it."""
        ...


@dataclass(frozen=True)
class ExpertStacks:
    """The weights of X experts, and how their products are combined.

    Attributes:
      gate: [X, F, E]; None if the experts have no gate.
      up: [X, F, E].
      down: [X, E, F].
      gate_bias: [X, F]; None for no bias, here and below.
      up_bias: [X, F].
      down_bias: [X, E].
      num_experts: X.
      gated_unit: Combines gate and up into the input of `down`.
      scales_input: Whether a token's weight for an expert multiplies the expert's input rather than its output.
      are_spread: Whether experts lie whole on the devices of the mesh, as many on each.
      additions: What is added to their products; every device has all of it. None: nothing.
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
        """(gate, up, down)."""
        return self.gate, self.up, self.down

    @property
    def biases(self) -> tuple[jax.Array | None, jax.Array | None, jax.Array | None]:
        """Those of (gate, up, down)."""
        return self.gate_bias, self.up_bias, self.down_bias

    def with_arrays(self, weights: Sequence[Any], biases: Sequence[Any], **others: Any) -> ExpertStacks:
        """The same with other `weights` and `biases`, and whatever else is given by name."""
        (gate, up, down), (gate_bias, up_bias, down_bias) = weights, biases
        arrays = {"gate": gate, "up": up, "down": down}
        arrays |= {"gate_bias": gate_bias, "up_bias": up_bias, "down_bias": down_bias}
        return dataclasses.replace(self, **arrays, **others)


Experts: TypeAlias = Callable[[jax.Array, jax.Array, jax.Array, ExpertStacks], jax.Array]
