"""Functions on weights of any form, including float arrays."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxis.kernels import native
from jaxis.kernels.activations import KERNEL_NAMES
from jaxis.kernels.weights.float_weight import as_value, as_weight
from jaxis.kernels.weights.grouped_experts import experts_by_groups
from jaxis.kernels.weights.packed_weight import PackedWeight, floats_of, quantize_and_pack
from jaxis.kernels.weights.products import matmul_on_device, matmul_on_shards
from jaxis.kernels.weights.quantize import quantize
from jaxis.kernels.weights.scheme import WeightScheme
from jaxis.kernels.weights.shards import (
    lookup_on_shards,
)
from jaxis.kernels.weights.weight import Allocate, ExpertStacks, WeightValue


def matmul(
    x: jax.Array,
    weight: WeightValue,
    *,
    preferred_element_type: DTypeLike | None = None,
    axes: tuple[str | None, str | None] = (None, None),
) -> jax.Array:
    """Returns `x @ weight.T`, [..., out], of x [..., in] and a weight [out, in]; the default type is x's.

    `axes` are the logical axes of the weight's (out, in), by which it is divided between devices.
    """
    if (y := matmul_on_shards(x, weight, preferred_element_type, axes)) is not None:
        return y
    return matmul_on_device(x, as_weight(weight), preferred_element_type)


def fused_matmul(
    x: jax.Array,
    weights: Sequence[WeightValue],
    addends: Sequence[jax.Array] = (),
    factors: Sequence[jax.Array] = (),
) -> list[jax.Array] | None:
    """Returns the products of one x [..., in] with weights, by `Weight.fused_matmul`; None without such a kernel."""
    first, *others = map(as_weight, weights)
    if any(type(weight) is not type(first) for weight in others):
        return None
    return first.fused_matmul(x, [first, *others], addends, factors)


def gated_matmul(
    x: jax.Array,
    gate: WeightValue,
    up: WeightValue,
    activation: Callable[[jax.Array], jax.Array],
    addends: Sequence[jax.Array] = (),
    factors: Sequence[jax.Array] = (),
) -> jax.Array | None:
    """Returns `activation(x @ gate.T) * (x @ up.T)`, as `Weight.gated_matmul` does; None without such a kernel."""
    if type(gate) is not type(up) or activation not in KERNEL_NAMES:
        return None
    return as_weight(gate).gated_matmul(x, up, KERNEL_NAMES[activation], addends, factors)


def head_matmul(x: jax.Array, weight: WeightValue) -> jax.Array:
    """Returns `x[t, h] @ weight[h].T`, [T, H, out] in x's type, for x [T, H, in] and a weight [H, out, in]."""
    return as_weight(weight).head_matmul(x)


def lookup(
    ids: jax.Array, weight: WeightValue, dtype: DTypeLike, *, axes: tuple[str | None, str | None] = (None, None)
) -> jax.Array:
    """Returns rows [T, in] of a weight [out, in], of type `dtype`; ids i32 [T] out of range are clipped."""
    if (rows := lookup_on_shards(ids, weight, dtype, axes[0])) is not None:
        return rows
    return as_weight(weight).lookup(ids, dtype)


def experts(x: jax.Array, expert_ids: jax.Array, expert_weights: jax.Array, stacks: ExpertStacks) -> jax.Array:
    """Returns `down(unit(gate(x), up(x)))` of each token's experts, weighted and summed, [T, E] in x's type.

    No token is dropped, and a token's result does not depend on the others. x is [T, E], the ids i32 [T, k], the
    weights float32 [T, k]. Either all stacks are packed and the kernel supports the unit, or none is packed.
    """
    if not isinstance(stacks.up, PackedWeight):
        return experts_by_groups(x, expert_ids, expert_weights, stacks)
    if stacks.additions is not None:
        return stacks.up.experts(x, expert_ids, expert_weights, stacks)  # which nothing differentiates
    kernel = _packed_experts(stacks.with_arrays([None] * 3, [None] * 3))
    return kernel(x, expert_ids, expert_weights, stacks.weights, stacks.biases)


@functools.cache
def _packed_experts(without_arrays: ExpertStacks) -> Callable[..., jax.Array]:
    """Returns `experts` of packed weights and biases, with the derivative of products of the floats they stand for."""

    def kernel(x: jax.Array, expert_ids: jax.Array, expert_weights: jax.Array, weights: Any, biases: Any) -> jax.Array:
        _, up, _ = weights
        return up.experts(x, expert_ids, expert_weights, without_arrays.with_arrays(weights, biases))

    def definition(
        x: jax.Array, expert_ids: jax.Array, expert_weights: jax.Array, weights: Any, biases: Any
    ) -> jax.Array:
        floats = [None if weight is None else floats_of(weight) for weight in weights]
        float_biases = [None if bias is None else bias.astype(jnp.float32) for bias in biases]
        stacks = without_arrays.with_arrays(floats, float_biases)
        return experts_by_groups(x.astype(jnp.float32), expert_ids, expert_weights, stacks).astype(x.dtype)

    return native.transformable(kernel, definition)


def dequantize(weight: WeightValue, dtype: DTypeLike = jnp.float32) -> jax.Array:
    """Returns the weight as an array [..., out, in]."""
    return as_weight(weight).dequantize(dtype)


def take_rows(weight: WeightValue, rows: np.ndarray) -> WeightValue:
    """Returns a weight [n, in] of the same form: rows int [n], in this order. Raises TypeError if it is packed."""
    return as_value(as_weight(weight).take_rows(rows))


def pack(
    weight: WeightValue,
    *,
    dtype: DTypeLike = jnp.float32,
    scheme: WeightScheme | None = None,
    allocate: Allocate | None = None,
) -> WeightValue:
    """Packs a weight [out, in] of host arrays for the native CPU kernels, unless they do not take it.

    Args:
      weight: The weight.
      dtype: Type of the model. A float array becomes bfloat16 if this is bfloat16; bfloat16 stays bfloat16.
      scheme: Quantizes a float array while packing, as `quantize` does; in one pass if native code supports it.
      allocate: Argument of `Weight.pack`.

    Raises:
      ValueError: `quantize` raises it.
    """
    if scheme is not None:
        array = np.asarray(weight)
        if (packed := quantize_and_pack(array, scheme, allocate)) is not None:
            return packed
        weight = quantize(array, scheme)
    packed = as_weight(weight).pack(dtype, allocate)
    return weight if packed is None else packed
