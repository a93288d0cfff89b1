"""A layer of experts on several devices, each with a part of every expert's features.

XLA cannot divide a kernel, and what it makes of a grouped product moves weights between devices or transposes them. So
each device runs the layer on its own part of the intermediate features, and one sum over the devices follows. Where a
part would cut groups of the last weight's features that share a scale, as 2,880 features in groups of 32 on 8 devices,
each device has a part of that weight's outputs instead, and the devices exchange the features before it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxis.kernels.weights.operations import Experts, ExpertStacks, GatedUnit
from jaxis.kernels.weights.shards import MODEL_AXIS, divided_axis, num_shards, shard_specs
from jaxis.parallel.mesh import on_each_device


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
    weights, biases = (stacks.gate, stacks.up, stacks.down), (stacks.gate_bias, stacks.up_bias, stacks.down_bias)
    specs = [
        None if weight is None else shard_specs(weight, axis, shards)
        for weight, axis in zip(weights, (-2, -2, down_axis), strict=True)
    ]
    if any(spec is None and weight is not None for spec, weight in zip(specs, weights, strict=True)):
        return None
    is_sum = down_axis == -1

    def on_shard(
        x: jax.Array, expert_ids: jax.Array, expert_weights: jax.Array, weights: Any, biases: Any
    ) -> jax.Array:
        (gate, up, down), (gate_bias, up_bias, down_bias) = weights, biases
        if is_sum and down_bias is not None:
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
            gated_unit=stacks.gated_unit if is_sum else _GatheredUnit(stacks.gated_unit),
            scales_input=stacks.scales_input,
        )
        y = layer(x, expert_ids, expert_weights, of_shard)
        return jax.lax.psum(y, MODEL_AXIS) if is_sum else _gathered(y)

    everywhere, divided = PartitionSpec(), PartitionSpec(None, MODEL_AXIS)
    bias_specs = (divided, divided, everywhere if is_sum else divided)
    return on_each_device(on_shard, (everywhere, everywhere, everywhere, tuple(specs), bias_specs), everywhere)(
        x, expert_ids, expert_weights, weights, biases
    )


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
