"""Mixture-of-experts layers over stacks of weights, and the grouped product that they consist of in plain JAX."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxis.kernels.grouped_matmul import accelerator_kernels, loop, reference
from jaxis.kernels.grouped_matmul import packed as packed_stacks
from jaxis.kernels.grouped_matmul.stored import stored_stack
from jaxis.kernels.platform import target_platform
from jaxis.kernels.quantized_matmul.packed import PackedWeight
from jaxis.kernels.weights.functions import dequantize, matmul
from jaxis.kernels.weights.operations import ExpertStacks, Weight, operations_of
from jaxis.kernels.weights.sharded_experts import experts_on_shards
from jaxis.kernels.weights.spread_experts import experts_on_their_devices


@jax.custom_vjp
def grouped_matmul(x: jax.Array, weight: Weight, group_sizes: jax.Array) -> jax.Array:
    """`x[rows of group g] @ weight[g].T` for each group g; `grouped_matmul.reference` defines it.

    Args:
      x: [N, in], sorted by group.
      weight: [X, out, in]; not packed.
      group_sizes: i32 [X], the number of rows of each group; their sum is at most N.

    Returns:
      [N, out] in x's type; rows past the last group are 0. Derivatives are those of the definition.
    """
    if target_platform() == "cpu":
        return loop.grouped_matmul(matmul, x, weight, group_sizes)
    kernels, stack = accelerator_kernels(), stored_stack(weight)
    if kernels is not None and stack is not None and kernels.supports(x, stack):
        return kernels.grouped_matmul(operations_of(weight).round_input(x, weight), stack, group_sizes)
    return _grouped_by_definition(x, weight, group_sizes)


def _grouped_by_definition(x: jax.Array, weight: Weight, group_sizes: jax.Array) -> jax.Array:
    x = operations_of(weight).round_input(x, weight)
    return reference.grouped_matmul(x, dequantize(weight, x.dtype), group_sizes)


def _forward(*operands: Any) -> tuple[jax.Array, tuple[Any, ...]]:
    return grouped_matmul(*operands), operands


def _backward(operands: tuple[Any, ...], cotangent: jax.Array) -> tuple[Any, ...]:
    return jax.vjp(_grouped_by_definition, *operands)[1](cotangent)


grouped_matmul.defvjp(_forward, _backward)


def experts_by_groups(
    x: jax.Array, expert_ids: jax.Array, expert_weights: jax.Array, stacks: ExpertStacks
) -> jax.Array:
    """`functions.experts` by grouped products, on each device if there are several."""
    y = experts_on_their_devices(_experts_by_groups, x, expert_ids, expert_weights, stacks)
    if y is None and target_platform() != "cpu":
        y = experts_on_shards(_experts_by_groups, x, expert_ids, expert_weights, stacks)
    return _experts_by_groups(x, expert_ids, expert_weights, stacks) if y is None else y


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

    def project(weight: Weight, bias: jax.Array | None, rows: jax.Array) -> jax.Array:
        y = grouped_matmul(rows, weight, group_sizes)
        return y if bias is None else y + bias.at[row_experts].get(mode="fill", fill_value=0)

    if stacks.scales_input:
        rows = rows * expert_weights.reshape(-1)[order, None].astype(rows.dtype)
    gate = None if stacks.gate is None else project(stacks.gate, stacks.gate_bias, rows)
    hidden = stacks.gated_unit(gate, project(stacks.up, stacks.up_bias, rows))
    outputs = project(stacks.down, stacks.down_bias, hidden)
    # Back to each token's slots, summed in their order regardless of what else is in the batch.
    outputs = jnp.zeros_like(outputs).at[order].set(outputs).reshape(num_tokens, k, -1).astype(jnp.float32)
    if not stacks.scales_input:
        outputs = outputs * expert_weights[:, :, None]
    return outputs.sum(1).astype(x.dtype)


def experts_packed(x: jax.Array, expert_ids: jax.Array, expert_weights: jax.Array, stacks: ExpertStacks) -> jax.Array:
    """`functions.experts` in one native kernel."""
    num_tokens, k = expert_ids.shape
    inputs = x.astype(jnp.float32)
    if stacks.scales_input:
        # One row per slot with its weight applied, so that the kernel needs no special case.
        inputs = (inputs[:, None] * expert_weights[:, :, None]).reshape(num_tokens * k, -1)
        expert_ids, expert_weights = expert_ids.reshape(-1, 1), jnp.ones((num_tokens * k, 1), jnp.float32)
    gate, up, down, unit = stacks.gate, stacks.up, stacks.down, stacks.gated_unit.kernel_arguments
    biases = [stacks.gate_bias, stacks.up_bias, stacks.down_bias]
    if gate is None:  # the kernel does not read it
        gate, biases[0] = up, stacks.up_bias
    assert isinstance(gate, PackedWeight)
    assert isinstance(up, PackedWeight)
    assert isinstance(down, PackedWeight)
    assert unit is not None
    y = packed_stacks.experts(
        inputs,
        expert_ids,
        expert_weights,
        gate,
        up,
        down,
        [bias.astype(jnp.float32) for bias in biases if bias is not None],
        act_qtype=gate.act_qtype,
        **unit,
    )
    if stacks.scales_input:
        y = y.reshape(num_tokens, k, -1).sum(1)
    return y.astype(x.dtype)
