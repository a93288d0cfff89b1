"""A layer of experts on several devices. Each has a part of every expert's features, or whole experts.

Parts of features: XLA cannot divide a kernel, and its own grouped product moves weights between devices or transposes
them. So each device runs the layer on its own part of the intermediate features, and one sum over the devices follows.
If a part would cut groups of the last weight's features that share a scale, as 2,880 features in groups of 32 on 8
devices, each device has a part of that weight's outputs instead, and the devices exchange the features before it.

Whole experts, equally many on each device (expert parallelism): every device gets all tokens and computes its own
experts' additions to them, and the devices' sums are added up. A token's slots for other devices' experts are rows of
no group, which cost no product. No token is dropped, whatever the load. The tokens are the whole step's; or, in a
region that is manual over the data axis, or over both axes, those of one data rank, which then gathers the others' and
takes back its own rows of the sums.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxis.kernels.low_rank import LowRankStack
from jaxis.kernels.platform import target_platform
from jaxis.kernels.weights.expert_additions import ExpertAdditions
from jaxis.kernels.weights.shards import MODEL_AXIS, divided_axis, num_shards, shard_specs
from jaxis.kernels.weights.weight import Experts, ExpertStacks, GatedUnit
from jaxis.parallel.mesh import DATA_AXIS, MESH_AXES, automatic_axes, on_each_device


def experts_on_shards(
    layer: Experts, x: jax.Array, expert_ids: jax.Array, expert_weights: jax.Array, stacks: ExpertStacks
) -> jax.Array | None:
    """Runs `layer(x, expert_ids, expert_weights, stacks)` with the intermediate features divided between devices.

    `layer` computes a layer of experts on one device; its arguments are those of `functions.experts`. Returns [T, E],
    or None if the current mesh does not divide these features, or a shard would not have its own scales.
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
    """Returns the specs of additions, which are divided like their weights.

    `is_sum` is True if devices have parts of the features before the last product, False for parts of its outputs.
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
    """Gated unit whose result [..., F] is whole on each device, from the devices' parts of gate and up."""

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
    return jax.lax.all_gather(part, MODEL_AXIS, axis=part.ndim - 1, tiled=True)


def experts_on_their_devices(
    layer: Experts, x: jax.Array, expert_ids: jax.Array, expert_weights: jax.Array, stacks: ExpertStacks
) -> jax.Array | None:
    """Runs `layer(x, expert_ids, expert_weights, stacks)` with the experts spread over all devices of the current mesh.

    `layer` computes a layer of experts on one device; its arguments are those of `functions.experts`. A slot whose id,
    among all experts, is past the last one adds nothing. The experts in `stacks` are a multiple of the devices; in a
    manual region, they are those of this rank or this device. `num_experts` counts all.

    Returns [T, E], or None if the experts are not spread, or there is one device.
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
    return jax.lax.all_gather(array, DATA_AXIS, tiled=True)


def _own_rows(y: jax.Array, num_tokens: int) -> jax.Array:
    """Sums all devices' additions to all ranks' tokens, and returns [T, E] of this rank's."""
    if target_platform() == "cpu":
        # Between processes, JAX's psum_scatter on CPU fails when one of them is late (docs/hosts.md).
        first = jax.lax.axis_index(DATA_AXIS) * num_tokens
        return jax.lax.dynamic_slice_in_dim(jax.lax.psum(y, MESH_AXES), first, num_tokens)
    # In this order, the second sum is of one rank's rows only.
    return jax.lax.psum(jax.lax.psum_scatter(y, DATA_AXIS, tiled=True), MODEL_AXIS)
