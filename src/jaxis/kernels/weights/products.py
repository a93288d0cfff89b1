"""Products with a weight: by XLA, or on TPU and GPU by a kernel if XLA would dequantize the weight in memory."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from jaxis.kernels.grouped_matmul import accelerator_kernels, kernels_of_platform
from jaxis.kernels.weights.float_weight import as_weight
from jaxis.kernels.weights.shards import (
    MODEL_AXIS,
    divided_axis,
    is_divided,
    num_shards,
    shard_specs,
    stack_struct,
)
from jaxis.kernels.weights.weight import Weight, WeightValue
from jaxis.parallel.mesh import on_each_device


def matmul_on_device(x: jax.Array, weight: Weight, preferred_element_type: DTypeLike | None) -> jax.Array:
    """Returns `weight.matmul(x, preferred_element_type)`, by a kernel of grouped products if it reads less than XLA.

    x is [..., in] and the weight [out, in]. Derivatives are those of `Weight.matmul`.
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
    """Returns `matmul` on several devices, each with a part of a low-precision weight, or all of it.

    XLA divides other products, but cannot divide a kernel. The result is None if XLA's own product is as good, or the
    weight cannot be divided.
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
