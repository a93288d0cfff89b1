"""A layer of experts on several devices, each with a part of every expert's features.

XLA cannot divide a kernel, and what it makes of a grouped product moves weights between devices or transposes them. So
each device runs the layer on its own part of the intermediate features, and one sum over the devices follows.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxis.kernels.weights.operations import Experts, ExpertStacks, Weight
from jaxis.kernels.weights.shards import MODEL_AXIS, num_shards, shard_specs


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
    shards = num_shards()
    if shards is None:
        return None
    weights, biases = (stacks.gate, stacks.up, stacks.down), (stacks.gate_bias, stacks.up_bias, stacks.down_bias)
    specs = [shard_specs(weight, axis, shards) for weight, axis in zip(weights, (-2, -2, -1), strict=True)]
    if any(spec is None for spec in specs):
        return None
    return _shard_mapped(layer, x, expert_ids, expert_weights, stacks, (weights, biases), specs)


def _shard_mapped(
    layer: Experts,
    x: jax.Array,
    expert_ids: jax.Array,
    expert_weights: jax.Array,
    stacks: ExpertStacks,
    parameters: tuple[tuple[Weight, ...], tuple[jax.Array | None, ...]],
    weight_specs: list[Any],
) -> jax.Array:
    """See `experts_on_shards`."""
    everywhere, divided = PartitionSpec(), PartitionSpec(None, MODEL_AXIS)

    def on_shard(
        x: jax.Array, expert_ids: jax.Array, expert_weights: jax.Array, weights: Any, biases: Any
    ) -> jax.Array:
        (gate, up, down), (gate_bias, up_bias, down_bias) = weights, biases
        if down_bias is not None:
            # It is added once, not on each device.
            down_bias = jnp.where(jax.lax.axis_index(MODEL_AXIS) == 0, down_bias, 0)
        of_shard = ExpertStacks(
            gate,
            up,
            down,
            gate_bias,
            up_bias,
            down_bias,
            num_experts=stacks.num_experts,
            gated_unit=stacks.gated_unit,
            scales_input=stacks.scales_input,
        )
        return jax.lax.psum(layer(x, expert_ids, expert_weights, of_shard), MODEL_AXIS)

    return jax.shard_map(
        on_shard,
        in_specs=(everywhere, everywhere, everywhere, tuple(weight_specs), (divided, divided, everywhere)),
        out_specs=everywhere,
        check_vma=False,
    )(x, expert_ids, expert_weights, *parameters)
