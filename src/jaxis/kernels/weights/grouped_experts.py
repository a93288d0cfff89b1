"""Mixture-of-experts layers over stacks of weights, and the grouped product that they consist of in plain JAX."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxis.kernels.grouped_matmul import accelerator_kernels, loop, reference
from jaxis.kernels.platform import target_platform
from jaxis.kernels.weights.experts_on_devices import experts_on_shards, experts_on_their_devices
from jaxis.kernels.weights.float_weight import as_weight
from jaxis.kernels.weights.weight import ExpertStacks, WeightValue

ROWS_AXIS = "rows"
"""Axis of `jax.vmap` over batch rows, all of whose tokens a layer of experts computes together."""


@jax.custom_vjp
def grouped_matmul(x: jax.Array, weight: WeightValue, group_sizes: jax.Array) -> jax.Array:
    """Computes `grouped_matmul.reference.grouped_matmul` for a weight in any form but packed.

    x is [N, in], sorted by group; the weight [X, out, in]; group_sizes i32 [X]. The result is in x's type.
    """
    if target_platform() == "cpu":
        return loop.grouped_matmul(lambda rows, of_group: as_weight(of_group).matmul(rows), x, weight, group_sizes)
    kernels, stack = accelerator_kernels(), as_weight(weight).kernel_stack()
    if kernels is not None and stack is not None and kernels.supports(x, stack):
        return kernels.grouped_matmul(as_weight(weight).round_input(x), stack, group_sizes)
    return _by_definition(x, weight, group_sizes)


def _by_definition(x: jax.Array, weight: WeightValue, group_sizes: jax.Array) -> jax.Array:
    x = as_weight(weight).round_input(x)
    return reference.grouped_matmul(x, as_weight(weight).dequantize(x.dtype), group_sizes)


def _forward(*operands: Any) -> tuple[jax.Array, tuple[Any, ...]]:
    return grouped_matmul(*operands), operands


def _backward(operands: tuple[Any, ...], cotangent: jax.Array) -> tuple[Any, ...]:
    x, weight, group_sizes = operands
    if target_platform() != "cpu":
        return jax.vjp(_by_definition, *operands)[1](cotangent)

    def transposed(rows: jax.Array, of_group: WeightValue) -> jax.Array:
        return rows @ as_weight(of_group).dequantize(rows.dtype)

    of_x = loop.grouped_matmul(transposed, cotangent, weight, group_sizes)
    floats, derive = jax.vjp(lambda weight: as_weight(weight).dequantize(x.dtype), weight)
    of_floats = loop.grouped_outer(cotangent, as_weight(weight).round_input(x), group_sizes)
    return of_x, *derive(of_floats.astype(floats.dtype)), None


grouped_matmul.defvjp(_forward, _backward)


def experts_by_groups(
    x: jax.Array, expert_ids: jax.Array, expert_weights: jax.Array, stacks: ExpertStacks
) -> jax.Array:
    """Computes `functions.experts` by grouped products, on each device if there are several."""

    def layer(x: jax.Array, expert_ids: jax.Array, expert_weights: jax.Array, weights: Any, biases: Any) -> jax.Array:
        operands = x, expert_ids, expert_weights, stacks.with_arrays(weights, biases)
        y = experts_on_their_devices(_experts_by_groups, *operands)
        if y is None and target_platform() != "cpu":
            y = experts_on_shards(_experts_by_groups, *operands)
        return _experts_by_groups(*operands) if y is None else y

    return _of_all_rows(layer)(x, expert_ids, expert_weights, stacks.weights, stacks.biases)


def _of_all_rows(layer: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Makes a layer compute all rows that `jax.vmap` maps over `ROWS_AXIS` as one array of tokens."""
    try:
        jax.lax.axis_size(ROWS_AXIS)
    except NameError:  # there is no such axis
        return layer
    mapped = jax.custom_batching.custom_vmap(layer)

    @mapped.def_vmap
    def vmap(axis_size: int, is_batched: Sequence[Any], *operands: Any) -> tuple[jax.Array, bool]:
        *of_tokens, weights, biases = operands
        rows = [
            each if batched else jnp.broadcast_to(each, (axis_size, *each.shape))
            for each, batched in zip(of_tokens, is_batched, strict=False)
        ]
        y = layer(*(each.reshape(-1, each.shape[-1]) for each in rows), weights, biases)
        return y.reshape(*rows[0].shape[:-1], -1), True

    return mapped


def _experts_by_groups(
    x: jax.Array, expert_ids: jax.Array, expert_weights: jax.Array, stacks: ExpertStacks
) -> jax.Array:
    """Sorts slots by expert and multiplies each group by its weights; slots with an id past the last add nothing."""
    num_tokens, k = expert_ids.shape
    slot_experts = expert_ids.reshape(-1)
    # Sort slots by expert, and by token within an expert.
    order = jnp.argsort(slot_experts, stable=True)
    group_sizes = jnp.bincount(slot_experts, length=stacks.num_experts).astype(jnp.int32)
    rows, row_experts = x[order // k], slot_experts[order]

    def project(weight: WeightValue, bias: jax.Array | None, rows: jax.Array) -> jax.Array:
        y = grouped_matmul(rows, weight, group_sizes)
        return y if bias is None else y + bias.at[row_experts].get(mode="fill", fill_value=0)

    if stacks.scales_input:
        rows = rows * expert_weights.reshape(-1)[order, None].astype(rows.dtype)
    additions, to_gate, to_up = stacks.additions, None, None
    slots = None if additions is None else additions.slots.reshape(-1)[order]
    if additions is not None and slots is not None:
        to_gate, to_up = additions.of_hidden(rows, slots)
    gate = None if stacks.gate is None else _sum(project(stacks.gate, stacks.gate_bias, rows), to_gate)
    hidden = stacks.gated_unit(gate, _sum(project(stacks.up, stacks.up_bias, rows), to_up))
    outputs = project(stacks.down, stacks.down_bias, hidden)
    if additions is not None and slots is not None:
        outputs = _sum(outputs, additions.of_outputs(hidden, slots))
    # Back to each token's slots, summed in their order regardless of what else is in the batch.
    outputs = jnp.zeros_like(outputs).at[order].set(outputs).reshape(num_tokens, k, -1).astype(jnp.float32)
    if not stacks.scales_input:
        outputs = outputs * expert_weights[:, :, None]
    return outputs.sum(1).astype(x.dtype)


def _sum(y: jax.Array, addend: jax.Array | None) -> jax.Array:
    return y if addend is None else (y.astype(jnp.float32) + addend).astype(y.dtype)
