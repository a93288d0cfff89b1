"""Mixture-of-experts layers over stacks of weights, and the grouped product that they consist of in plain JAX."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxis.kernels.grouped_matmul import accelerator_kernels, loop, reference
from jaxis.kernels.low_rank import LowRankStack
from jaxis.kernels.platform import target_platform
from jaxis.kernels.weights.expert_additions import ExpertAdditions
from jaxis.kernels.weights.float_weight import as_weight
from jaxis.kernels.weights.shards import MODEL_AXIS, divided_axis, num_shards, shard_specs
from jaxis.kernels.weights.weight import Experts, ExpertStacks, GatedUnit, WeightValue
from jaxis.parallel.mesh import DATA_AXIS, MESH_AXES, automatic_axes, on_each_device

# A layer of experts on several devices: each has a part of every expert's features, or whole experts.
#
# Parts of features: XLA cannot divide a kernel, and what it makes of a grouped product moves weights between devices
# or transposes them. So each device runs the layer on its own part of the intermediate features, and one sum over the
# devices follows. Where a part would cut groups of the last weight's features that share a scale, as 2,880 features
# in groups of 32 on 8 devices, each device has a part of that weight's outputs instead, and the devices exchange the
# features before it.
#
# Whole experts, as many on each device (expert parallelism): every device gets all tokens, computes what its own
# experts add to them, and the devices' sums are added up. A token's slots for other devices' experts are rows of no
# group, which cost no product. No token is dropped, whatever the load. The tokens are the whole step's; or, in a
# region that is manual over the data axis, or over both axes, those of one data rank, which then gathers the others'
# and takes back its own rows of the sums.


def experts_on_shards(
    layer: Experts, x: jax.Array, expert_ids: jax.Array, expert_weights: jax.Array, stacks: ExpertStacks
) -> jax.Array | None:
    """`layer(x, expert_ids, expert_weights, stacks)` with the intermediate features divided between devices.

    Args:
      layer: Computes a layer of experts on one device.
      x: [T, E].
      expert_ids: i32 [T, k].
      expert_weights: float32 [T, k].
      stacks: The experts.

    Returns:
      [T, E]; None if the current mesh does not divide these features, or the scales of a shard would not be its own.
    """
    if (shards := num_shards()) is None:
        return None
    down_axis = divided_axis(stacks.down, ("expert", "embed", "mlp"))
    if down_axis is None:
        return None
    axes = (-2, -2, down_axis)
    specs = [None if w is None else shard_specs(w, axis, shards) for w, axis in zip(stacks.weights, axes, strict=True)]
    if any(spec is None and weight is not None for spec, weight in zip(specs, stacks.weights, strict=True)):
        return None
    is_sum = down_axis == -1

    def on_shard(
        x: jax.Array,
        expert_ids: jax.Array,
        expert_weights: jax.Array,
        weights: Any,
        biases: Any,
        additions: ExpertAdditions | None,
    ) -> jax.Array:
        *others, down_bias = biases
        if is_sum and down_bias is not None:
            # It is added once, not on each device.
            down_bias = jnp.where(jax.lax.axis_index(MODEL_AXIS) == 0, down_bias, 0)
        unit = stacks.gated_unit if is_sum else _GatheredUnit(stacks.gated_unit)
        of_shard = stacks.with_arrays(
            weights, (*others, down_bias), gated_unit=unit, are_spread=False, additions=additions
        )
        y = layer(x, expert_ids, expert_weights, of_shard)
        return jax.lax.psum(y, MODEL_AXIS) if is_sum else _gathered(y)

    everywhere, divided = PartitionSpec(), PartitionSpec(None, MODEL_AXIS)
    bias_specs = (divided, divided, everywhere if is_sum else divided)
    in_specs = (everywhere, everywhere, everywhere, tuple(specs), bias_specs, _addition_specs(stacks.additions, is_sum))
    return on_each_device(on_shard, in_specs, everywhere)(
        x, expert_ids, expert_weights, stacks.weights, stacks.biases, stacks.additions
    )


def _addition_specs(additions: ExpertAdditions | None, is_sum: bool) -> Any:
    """The specs of additions, which are divided as the weights beside them.

    Args:
      additions: The additions.
      is_sum: Whether devices have parts of the features before the last product; else, of its outputs.
    """
    if additions is None:
        return None
    everywhere: Any = PartitionSpec()
    divided: Any = PartitionSpec(None, None, MODEL_AXIS)
    by_outputs = LowRankStack(everywhere, divided, everywhere)
    by_inputs = LowRankStack(divided, everywhere, everywhere)
    gate = None if additions.gate is None else by_outputs
    return ExpertAdditions(everywhere, gate, by_outputs, by_inputs if is_sum else by_outputs)


@dataclass(frozen=True)
class _GatheredUnit:
    """A gated unit whose result, [..., F], is whole on each device, from the device's parts of gate and up.

    Attributes:
      unit: The unit.
    """

    unit: GatedUnit

    @property
    def has_gate(self) -> bool:
        return self.unit.has_gate

    def __call__(self, gate: Any, up: jax.Array) -> jax.Array:
        return _gathered(self.unit(gate, up))

    @property
    def kernel_arguments(self) -> Mapping[str, Any] | None:
        return None


def _gathered(part: jax.Array) -> jax.Array:
    """Each device's part of the last axis -> all of it."""
    return jax.lax.all_gather(part, MODEL_AXIS, axis=part.ndim - 1, tiled=True)


def experts_on_their_devices(
    layer: Experts, x: jax.Array, expert_ids: jax.Array, expert_weights: jax.Array, stacks: ExpertStacks
) -> jax.Array | None:
    """`layer(x, expert_ids, expert_weights, stacks)` with the experts spread over all devices of the current mesh.

    Args:
      layer: Computes a layer of experts on one device; slots with an id past the last expert add nothing.
      x: [T, E].
      expert_ids: i32 [T, k], of all experts; a slot with an id past the last one adds nothing.
      expert_weights: float32 [T, k].
      stacks: The experts, whose number is a multiple of the number of devices; in a manual region, this rank's own, or
        this device's. `num_experts` is that of all.

    Returns:
      [T, E]; None if the experts are not spread, or there is one device.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if not stacks.are_spread or mesh.size <= 1:
        return None
    of_rank = DATA_AXIS not in automatic_axes()
    experts_per_device = stacks.num_experts // mesh.size

    def on_device(
        x: jax.Array,
        expert_ids: jax.Array,
        expert_weights: jax.Array,
        weights: Any,
        biases: Any,
        additions: ExpertAdditions | None,
    ) -> jax.Array:
        num_tokens = len(x)
        if of_rank:
            x, expert_ids, expert_weights = (_of_all_ranks(array) for array in (x, expert_ids, expert_weights))
        own = expert_ids - jax.lax.axis_index(MESH_AXES) * experts_per_device
        is_here = (own >= 0) & (own < experts_per_device)
        if additions is not None:
            slots = _of_all_ranks(additions.slots) if of_rank else additions.slots
            additions = additions._replace(slots=jnp.where(is_here, slots, 0))
        of_device = stacks.with_arrays(
            weights, biases, num_experts=experts_per_device, are_spread=False, additions=additions
        )
        y = layer(x, jnp.where(is_here, own, experts_per_device), expert_weights, of_device)
        return _own_rows(y, num_tokens) if of_rank else jax.lax.psum(y, MESH_AXES)

    everywhere, divided = PartitionSpec(), PartitionSpec(MODEL_AXIS if of_rank else MESH_AXES)
    in_specs = (everywhere, everywhere, everywhere, divided, divided, everywhere)
    operands = (x, expert_ids, expert_weights, stacks.weights, stacks.biases, stacks.additions)
    return on_each_device(on_device, in_specs, everywhere)(*operands)


def _of_all_ranks(array: jax.Array) -> jax.Array:
    """A data rank's rows -> those of all ranks."""
    return jax.lax.all_gather(array, DATA_AXIS, tiled=True)


def _own_rows(y: jax.Array, num_tokens: int) -> jax.Array:
    """The sum over all devices of what each adds to all ranks' tokens -> [T, E] of this rank's."""
    if target_platform() == "cpu":
        # Between processes, JAX's psum_scatter on CPU fails when one of them is late (test_distributed.py).
        first = jax.lax.axis_index(DATA_AXIS) * num_tokens
        return jax.lax.dynamic_slice_in_dim(jax.lax.psum(y, MESH_AXES), first, num_tokens)
    # In this order, the second sum is of one rank's rows only.
    return jax.lax.psum(jax.lax.psum_scatter(y, DATA_AXIS, tiled=True), MODEL_AXIS)


@jax.custom_vjp
def grouped_matmul(x: jax.Array, weight: WeightValue, group_sizes: jax.Array) -> jax.Array:
    """`x[rows of group g] @ weight[g].T` for each group g; `grouped_matmul.reference` defines it.

    Args:
      x: [N, in], sorted by group.
      weight: [X, out, in]; not packed.
      group_sizes: i32 [X], the number of rows of each group; their sum is at most N.

    Returns:
      [N, out] in x's type; rows past the last group are 0. Derivatives are those of the definition.
    """
    if target_platform() == "cpu":
        return loop.grouped_matmul(lambda rows, of_group: as_weight(of_group).matmul(rows), x, weight, group_sizes)
    kernels, stack = accelerator_kernels(), as_weight(weight).kernel_stack()
    if kernels is not None and stack is not None and kernels.supports(x, stack):
        return kernels.grouped_matmul(as_weight(weight).round_input(x), stack, group_sizes)
    return _grouped_by_definition(x, weight, group_sizes)


def _grouped_by_definition(x: jax.Array, weight: WeightValue, group_sizes: jax.Array) -> jax.Array:
    x = as_weight(weight).round_input(x)
    return reference.grouped_matmul(x, as_weight(weight).dequantize(x.dtype), group_sizes)


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
