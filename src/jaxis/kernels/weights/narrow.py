"""Products with one narrow weight, by the kernels of grouped products where XLA would widen the weight in memory."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from jaxis.kernels.grouped_matmul import accelerator_kernels, kernels_of_platform
from jaxis.kernels.grouped_matmul.stored import stored_stack
from jaxis.kernels.quantized_matmul.block_scaled import BlockScaledWeight
from jaxis.kernels.quantized_matmul.coded import CodedWeight
from jaxis.kernels.quantized_matmul.weight import QuantizedWeight
from jaxis.kernels.weights.operations import Weight, operations_of
from jaxis.kernels.weights.shards import MODEL_AXIS, divided_axis, is_divided, num_shards, shard_specs
from jaxis.parallel.mesh import on_each_device

NarrowWeight = QuantizedWeight | BlockScaledWeight | CodedWeight
Product = Callable[[jax.Array, Any, DTypeLike | None], jax.Array]


def narrow_matmul(
    definition: Product, x: jax.Array, weight: NarrowWeight, preferred_element_type: DTypeLike | None
) -> jax.Array:
    """`definition(x, weight, preferred_element_type)`, by a kernel if there is one and it reads less than XLA.

    Args:
      definition: The product in plain JAX.
      x: [..., in].
      weight: Stands for [out, in].
      preferred_element_type: Type of the result; None means x's.

    Returns:
      [..., out]. Derivatives are those of the definition.
    """
    kernels = accelerator_kernels()
    if kernels is None:
        return definition(x, weight, preferred_element_type)
    stack = stored_stack(_one_group(weight))
    rows = jax.ShapeDtypeStruct((math.prod(x.shape[:-1]), x.shape[-1]), x.dtype)
    if stack is None or not kernels.xla_widens(stack) or not kernels.supports(rows, stack):
        return definition(x, weight, preferred_element_type)
    return _by_kernel(definition, preferred_element_type, x, weight)


def narrow_matmul_on_shards(
    x: jax.Array, weight: Weight, preferred_element_type: DTypeLike | None, axes: tuple[str | None, str | None]
) -> jax.Array | None:
    """`x @ weight.T` on several devices, each with a part of a narrow weight, or all of it: XLA cannot divide a kernel.

    Args:
      x: [..., in].
      weight: Stands for [out, in].
      preferred_element_type: Type of the result; None means x's.
      axes: Logical axes of the weight's (out, in).

    Returns:
      [..., out]; None if XLA's own product is as good, or the weight cannot be divided.
    """
    kernels, shards = kernels_of_platform(), num_shards()
    if kernels is None or shards is None or not isinstance(weight, NarrowWeight):
        return None
    stack = stored_stack(_one_group(weight))
    if stack is None or not kernels.xla_widens(stack):
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

    def on_shard(x: jax.Array, weight: NarrowWeight) -> jax.Array:
        y = operations_of(weight).matmul(x, weight, preferred_element_type)
        return jax.lax.psum(y, MODEL_AXIS) if axis == -1 else y

    return on_each_device(on_shard, in_specs, out_specs)(x, weight)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _by_kernel(
    definition: Product,  # noqa: ARG001 (what the backward pass differentiates)
    preferred_element_type: DTypeLike | None,
    x: jax.Array,
    weight: NarrowWeight,
) -> jax.Array:
    kernels, stack = accelerator_kernels(), stored_stack(_one_group(weight))
    assert kernels is not None
    assert stack is not None
    rows = operations_of(weight).round_input(x, weight).reshape(-1, x.shape[-1])
    all_rows = jnp.full(1, len(rows), jnp.int32)
    y = kernels.grouped_matmul(rows, stack, all_rows, out_dtype=preferred_element_type)
    return y.reshape(*x.shape[:-1], -1)


def _forward(
    definition: Product, preferred_element_type: DTypeLike | None, x: jax.Array, weight: NarrowWeight
) -> tuple[jax.Array, tuple[jax.Array, NarrowWeight]]:
    return _by_kernel(definition, preferred_element_type, x, weight), (x, weight)


def _backward(
    definition: Product,
    preferred_element_type: DTypeLike | None,
    operands: tuple[jax.Array, NarrowWeight],
    cotangent: jax.Array,
) -> tuple[jax.Array, NarrowWeight]:
    return jax.vjp(lambda x, weight: definition(x, weight, preferred_element_type), *operands)[1](cotangent)


_by_kernel.defvjp(_forward, _backward)


def _one_group(weight: NarrowWeight) -> NarrowWeight:
    """A weight [out, in] as a stack [1, out, in]."""
    return jax.tree.map(lambda array: jnp.asarray(array)[None], weight)
