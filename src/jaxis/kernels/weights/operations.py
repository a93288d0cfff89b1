"""The operations on weights, dispatched by the weight's type."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import jax
import numpy as np

from jaxis.kernels.quantized_matmul.block_scaled import BlockScaledWeight
from jaxis.kernels.quantized_matmul.coded import CodedWeight
from jaxis.kernels.quantized_matmul.packed import Allocate, PackedWeight
from jaxis.kernels.quantized_matmul.reordered import ReorderedWeight
from jaxis.kernels.quantized_matmul.weight import QuantizedWeight

Weight: TypeAlias = (
    jax.Array | np.ndarray | QuantizedWeight | BlockScaledWeight | CodedWeight | PackedWeight | ReorderedWeight
)


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
        """The unit as arguments of `grouped_matmul.packed.experts`; None if the kernel does not support it."""
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
    """

    gate: Weight | None
    up: Weight
    down: Weight
    gate_bias: jax.Array | None
    up_bias: jax.Array | None
    down_bias: jax.Array | None
    num_experts: int
    gated_unit: GatedUnit
    scales_input: bool
    are_spread: bool = False


Experts: TypeAlias = Callable[[jax.Array, jax.Array, jax.Array, ExpertStacks], jax.Array]


@dataclass(frozen=True)
class Operations:
    """The operations on one type of weight.

    Attributes:
      matmul: (x [..., in], weight, preferred_element_type) -> [..., out].
      lookup: (ids i32 [T], weight, dtype) -> rows [T, in]; ids out of range are clipped.
      dequantize: (weight, dtype) -> the weight as an array [..., out, in].
      pack: (weight of host arrays, dtype, allocate) -> the weight packed; None if the native kernels do not take it.
      experts: `functions.experts`, chosen by the type of the `up` stack.
      round_input: (x, weight) -> x as the product rounds it first, in x's type.
      fused_matmul: (x, weights) -> the products in one kernel; None if these weights cannot be fused.
      gated_matmul: (x, gate, up, activation's kernel name) -> `activation(x gate^T) * (x up^T)`; None if not fusible.
    """

    matmul: Callable[[jax.Array, Any, Any], jax.Array]
    lookup: Callable[[jax.Array, Any, Any], jax.Array]
    dequantize: Callable[[Any, Any], jax.Array]
    pack: Callable[[Any, Any, Allocate | None], PackedWeight | ReorderedWeight | None]
    experts: Experts
    round_input: Callable[[jax.Array, Any], jax.Array] = lambda x, _: x
    fused_matmul: Callable[[jax.Array, Sequence[Any]], list[jax.Array] | None] = lambda *_: None
    gated_matmul: Callable[[jax.Array, Any, Any, str], jax.Array | None] = lambda *_: None


_table: dict[type, Operations] = {}


def register(kind: type, operations: Operations) -> None:
    """Registers the operations on a type of weight."""
    _table[kind] = operations


def operations_of(weight: Weight) -> Operations:
    """The operations on this weight's type.

    Raises:
      TypeError: Not a registered type of weight.
    """
    for kind, operations in _table.items():
        if isinstance(weight, kind):
            return operations
    raise TypeError(f"{type(weight).__name__} is not a type of weight: see kernels/weights/table.py")
