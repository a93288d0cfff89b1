"""Functions on weights of any type."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxis.kernels.activations import KERNEL_NAMES
from jaxis.kernels.quantized_matmul import packed
from jaxis.kernels.quantized_matmul.packed import Allocate
from jaxis.kernels.quantized_matmul.quantize import quantize
from jaxis.kernels.quantized_matmul.weight import WeightScheme
from jaxis.kernels.weights.narrow import narrow_matmul_on_shards
from jaxis.kernels.weights.operations import ExpertStacks, Weight, operations_of
from jaxis.kernels.weights.sharded_lookup import lookup_on_shards


def matmul(
    x: jax.Array,
    weight: Weight,
    *,
    preferred_element_type: DTypeLike | None = None,
    axes: tuple[str | None, str | None] = (None, None),
) -> jax.Array:
    """`x @ weight.T`.

    Args:
      x: [..., in].
      weight: [out, in].
      preferred_element_type: Type of the result; None means x's.
      axes: Logical axes of the weight's (out, in), by which it is divided between devices.

    Returns:
      [..., out].
    """
    if (y := narrow_matmul_on_shards(x, weight, preferred_element_type, axes)) is not None:
        return y
    return operations_of(weight).matmul(x, weight, preferred_element_type)


def fused_matmul(x: jax.Array, weights: Sequence[Weight]) -> list[jax.Array] | None:
    """`matmul` of one x [..., in] with each of the weights, in one kernel; None if no kernel supports them."""
    if any(type(weight) is not type(weights[0]) for weight in weights):
        return None
    return operations_of(weights[0]).fused_matmul(x, weights)


def gated_matmul(
    x: jax.Array, gate: Weight, up: Weight, activation: Callable[[jax.Array], jax.Array]
) -> jax.Array | None:
    """`activation(x @ gate.T) * (x @ up.T)` for x [..., in], in one kernel; None if no kernel supports it."""
    if type(gate) is not type(up) or activation not in KERNEL_NAMES:
        return None
    return operations_of(gate).gated_matmul(x, gate, up, KERNEL_NAMES[activation])


def lookup(
    ids: jax.Array, weight: Weight, dtype: DTypeLike, *, axes: tuple[str | None, str | None] = (None, None)
) -> jax.Array:
    """Rows of a weight.

    Args:
      ids: i32 [T]; those out of range are clipped.
      weight: [out, in].
      dtype: A float type, of the result.
      axes: See `matmul`.

    Returns:
      [T, in].
    """
    if (rows := lookup_on_shards(ids, weight, dtype, axes[0])) is not None:
        return rows
    return operations_of(weight).lookup(ids, weight, dtype)


def experts(x: jax.Array, expert_ids: jax.Array, expert_weights: jax.Array, stacks: ExpertStacks) -> jax.Array:
    """`down(unit(gate(x), up(x)))` of the experts each token goes to, weighted and summed.

    No token is dropped, and a token's result does not depend on the others.

    Args:
      x: [T, E].
      expert_ids: i32 [T, k].
      expert_weights: float32 [T, k].
      stacks: The experts; either all weights are packed and the kernel supports the unit, or none is packed.

    Returns:
      [T, E] in x's type.
    """
    return operations_of(stacks.up).experts(x, expert_ids, expert_weights, stacks)


def dequantize(weight: Weight, dtype: DTypeLike = jnp.float32) -> jax.Array:
    """The weight as an array [..., out, in]."""
    return operations_of(weight).dequantize(weight, dtype)


def pack(
    weight: Weight,
    *,
    dtype: DTypeLike = jnp.float32,
    scheme: WeightScheme | None = None,
    allocate: Allocate | None = None,
) -> Weight:
    """Packs a weight [out, in] of host arrays for the native CPU kernels.

    Args:
      weight: The weight.
      dtype: The model's type. A float array becomes bfloat16 if this is bfloat16, and stays bfloat16 if it is already.
      scheme: Quantizes a float array while packing, as `quantize` does; in one pass if native code supports it.
      allocate: See `packed.pack`.

    Returns:
      A PackedWeight, a ReorderedWeight of one, or the (quantized) weight, unpacked, if the kernels do not take it.

    Raises:
      ValueError: See `quantize`.
    """
    if scheme is not None:
        array = np.asarray(weight)
        packed_weight = packed.quantize_and_pack(array, scheme, allocate)
        if packed_weight is not None:
            return packed_weight
        weight = quantize(array, scheme)
    packed_weight = operations_of(weight).pack(weight, dtype, allocate)
    return weight if packed_weight is None else packed_weight
