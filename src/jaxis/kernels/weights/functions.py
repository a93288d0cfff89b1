"""Functions on weights of any form, float arrays among them."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from jaxis.kernels import native
from jaxis.kernels.activations import KERNEL_NAMES
from jaxis.kernels.grouped_matmul import accelerator_kernels, kernels_of_platform
from jaxis.kernels.weights.float_weight import as_value, as_weight
from jaxis.kernels.weights.grouped_experts import experts_by_groups
from jaxis.kernels.weights.packed_weight import PackedWeight, floats_of, quantize_and_pack
from jaxis.kernels.weights.quantize import quantize
from jaxis.kernels.weights.scheme import WeightScheme
from jaxis.kernels.weights.shards import (
    MODEL_AXIS,
    divided_axis,
    is_divided,
    lookup_on_shards,
    num_shards,
    shard_specs,
    stack_struct,
)
from jaxis.kernels.weights.weight import Allocate, ExpertStacks, Weight, WeightValue
from jaxis.parallel.mesh import on_each_device

# Products with a weight: by XLA, or on TPU and GPU by a kernel where XLA would hold it dequantized in memory.


def matmul_on_device(x: jax.Array, weight: Weight, preferred_element_type: DTypeLike | None) -> jax.Array:
    """`weight.matmul(x, preferred_element_type)`, by a kernel of grouped products if it reads less than XLA.

    Args:
      x: [..., in].
      weight: Stands for [out, in].
      preferred_element_type: Type of the result; None means x's.

    Returns:
      [..., out]. Derivatives are those of `Weight.matmul`.
    """
    kernels = accelerator_kernels()
    if kernels is not None:
        stack, rows = stack_struct(weight), jax.ShapeDtypeStruct((math.prod(x.shape[:-1]), x.shape[-1]), x.dtype)
        if stack is not None and kernels.xla_dequantizes_in_memory(stack) and kernels.supports(rows, stack):
            return _by_kernel(preferred_element_type, x, weight)
    return weight.matmul(x, preferred_element_type)


def matmul_on_shards(
    x: jax.Array, weight: WeightValue, preferred_element_type: DTypeLike | None, axes: tuple[str | None, str | None]
) -> jax.Array | None:
    """`x @ weight.T` on several devices, each with a part of a low-precision weight, or all of it.

    XLA, which divides other products, cannot divide a kernel.

    Args:
      x: [..., in].
      weight: Stands for [out, in].
      preferred_element_type: Type of the result; None means x's.
      axes: Logical axes of the weight's (out, in).

    Returns:
      [..., out]; None if XLA's own product is as good, or the weight cannot be divided.
    """
    kernels, shards = kernels_of_platform(), num_shards()
    if kernels is None or shards is None:
        return None
    stack = stack_struct(weight)
    if stack is None or not kernels.xla_dequantizes_in_memory(stack):
        return None
    of_features, everywhere = PartitionSpec(*[None] * (x.ndim - 1), MODEL_AXIS), PartitionSpec()
    axis = divided_axis(weight, axes)
    if axis is not None:
        in_specs = (everywhere if axis == -2 else of_features, shard_specs(weight, axis, shards))
        out_specs = of_features if axis == -2 else everywhere
    elif not any(is_divided(name) for name in axes):
        in_specs, out_specs = (everywhere, jax.tree.map(lambda _: everywhere, weight)), everywhere
    else:
        return None

    def on_shard(x: jax.Array, of_shard: WeightValue) -> jax.Array:
        y = matmul_on_device(x, as_weight(of_shard), preferred_element_type)
        return jax.lax.psum(y, MODEL_AXIS) if axis == -1 else y

    return on_each_device(on_shard, in_specs, out_specs)(x, weight)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _by_kernel(preferred_element_type: DTypeLike | None, x: jax.Array, weight: Weight) -> jax.Array:
    one_group = jax.tree.map(lambda array: jnp.asarray(array)[None], weight)
    kernels, stack = accelerator_kernels(), one_group.kernel_stack()
    assert kernels is not None
    assert stack is not None
    rows = weight.round_input(x).reshape(-1, x.shape[-1])
    all_rows = jnp.full(1, len(rows), jnp.int32)
    y = kernels.grouped_matmul(rows, stack, all_rows, out_dtype=preferred_element_type)
    return y.reshape(*x.shape[:-1], -1)


def _forward(
    preferred_element_type: DTypeLike | None, x: jax.Array, weight: Weight
) -> tuple[jax.Array, tuple[jax.Array, Weight]]:
    return _by_kernel(preferred_element_type, x, weight), (x, weight)


def _backward(
    preferred_element_type: DTypeLike | None, operands: tuple[jax.Array, Weight], cotangent: jax.Array
) -> tuple[jax.Array, Weight]:
    return jax.vjp(lambda x, weight: weight.matmul(x, preferred_element_type), *operands)[1](cotangent)


_by_kernel.defvjp(_forward, _backward)


def matmul(
    x: jax.Array,
    weight: WeightValue,
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
    if (y := matmul_on_shards(x, weight, preferred_element_type, axes)) is not None:
        return y
    return matmul_on_device(x, as_weight(weight), preferred_element_type)


def fused_matmul(
    x: jax.Array,
    weights: Sequence[WeightValue],
    addends: Sequence[jax.Array] = (),
    factors: Sequence[jax.Array] = (),
) -> list[jax.Array] | None:
    """`matmul` of one x [..., in] with each of the weights, in one kernel; None if no kernel supports them.

    Addends and factors: see `Weight.fused_matmul`.
    """
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
    """`activation(x @ gate.T) * (x @ up.T)` for x [..., in], in one kernel; None if no kernel supports it.

    Addends and factors: see `Weight.gated_matmul`.
    """
    if type(gate) is not type(up) or activation not in KERNEL_NAMES:
        return None
    return as_weight(gate).gated_matmul(x, up, KERNEL_NAMES[activation], addends, factors)


def head_matmul(x: jax.Array, weight: WeightValue) -> jax.Array:
    """The product of each token's heads with one matrix per head: how attention over latents absorbs projections.

    Args:
      x: [T, H, in].
      weight: [H, out, in].

    Returns:
      [T, H, out] in x's type: `x[t, h] @ weight[h].T` for each token t and head h.
    """
    return as_weight(weight).head_matmul(x)


def lookup(
    ids: jax.Array, weight: WeightValue, dtype: DTypeLike, *, axes: tuple[str | None, str | None] = (None, None)
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
    return as_weight(weight).lookup(ids, dtype)


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
    if not isinstance(stacks.up, PackedWeight):
        return experts_by_groups(x, expert_ids, expert_weights, stacks)
    if stacks.additions is not None:
        return stacks.up.experts(x, expert_ids, expert_weights, stacks)  # which nothing differentiates
    kernel = _packed_experts(stacks.with_arrays([None] * 3, [None] * 3))
    return kernel(x, expert_ids, expert_weights, stacks.weights, stacks.biases)


@functools.cache
def _packed_experts(without_arrays: ExpertStacks) -> Callable[..., jax.Array]:
    """`experts` of weights and biases of packed stacks; its derivative is that of products of what these stand for."""

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
    """The weight as an array [..., out, in]."""
    return as_weight(weight).dequantize(dtype)


def take_rows(weight: WeightValue, rows: np.ndarray) -> WeightValue:
    """A weight of the same form [n, in] whose outputs are these, int [n], of a weight [out, in], in this order.

    Raises:
      TypeError: The weight is packed.
    """
    return as_value(as_weight(weight).take_rows(rows))


def pack(
    weight: WeightValue,
    *,
    dtype: DTypeLike = jnp.float32,
    scheme: WeightScheme | None = None,
    allocate: Allocate | None = None,
) -> WeightValue:
    """Packs a weight [out, in] of host arrays for the native CPU kernels.

    Args:
      weight: The weight.
      dtype: The model's type. A float array becomes bfloat16 if this is bfloat16, and stays bfloat16 if it is already.
      scheme: Quantizes a float array while packing, as `quantize` does; in one pass if native code supports it.
      allocate: See `Weight.pack`.

    Returns:
      The packed weight, or the (quantized) weight as it is if the kernels do not take it.

    Raises:
      ValueError: See `quantize`.
    """
    if scheme is not None:
        array = np.asarray(weight)
        if (packed := quantize_and_pack(array, scheme, allocate)) is not None:
            return packed
        weight = quantize(array, scheme)
    packed = as_weight(weight).pack(dtype, allocate)
    return weight if packed is None else packed
