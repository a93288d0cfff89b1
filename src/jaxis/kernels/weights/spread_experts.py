"""A layer of experts that lie whole on devices, as many on each: expert parallelism.

Every device gets all tokens, computes what its own experts add to them, and the devices' sums are added up. A token's
slots for other devices' experts are rows of no group, which cost no product. No token is dropped, whatever the load.

The tokens are the whole step's; or, in a region that is manual over the data axis, or over both axes, those of one data
rank, which then gathers the others' and takes back its own rows of the sums.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxis.kernels.platform import target_platform
from jaxis.kernels.weights.operations import Experts, ExpertStacks
from jaxis.parallel.mesh import DATA_AXIS, MESH_AXES, MODEL_AXIS, automatic_axes, on_each_device


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
        x: jax.Array, expert_ids: jax.Array, expert_weights: jax.Array, weights: Any, biases: Any
    ) -> jax.Array:
        num_tokens = len(x)
        if of_rank:
            x, expert_ids, expert_weights = (
                jax.lax.all_gather(array, DATA_AXIS, tiled=True) for array in (x, expert_ids, expert_weights)
            )
        own = expert_ids - jax.lax.axis_index(MESH_AXES) * experts_per_device
        is_here = (own >= 0) & (own < experts_per_device)
        (gate, up, down), (gate_bias, up_bias, down_bias) = weights, biases
        of_device = dataclasses.replace(
            stacks,
            gate=gate,
            up=up,
            down=down,
            gate_bias=gate_bias,
            up_bias=up_bias,
            down_bias=down_bias,
            num_experts=experts_per_device,
            are_spread=False,
        )
        y = layer(x, jnp.where(is_here, own, experts_per_device), expert_weights, of_device)
        return _own_rows(y, num_tokens) if of_rank else jax.lax.psum(y, MESH_AXES)

    weights, biases = (stacks.gate, stacks.up, stacks.down), (stacks.gate_bias, stacks.up_bias, stacks.down_bias)
    everywhere, divided = PartitionSpec(), PartitionSpec(MODEL_AXIS if of_rank else MESH_AXES)
    in_specs = (everywhere, everywhere, everywhere, divided, divided)
    return on_each_device(on_device, in_specs, everywhere)(x, expert_ids, expert_weights, weights, biases)


def _own_rows(y: jax.Array, num_tokens: int) -> jax.Array:
    """The sum over all devices of what each adds to all ranks' tokens -> [T, E] of this rank's."""
    if target_platform() == "cpu":
        # Between processes, JAX's psum_scatter on CPU fails when one of them is late (docs/hosts.md).
        first = jax.lax.axis_index(DATA_AXIS) * num_tokens
        return jax.lax.dynamic_slice_in_dim(jax.lax.psum(y, MESH_AXES), first, num_tokens)
    # In this order, the second sum is of one rank's rows only.
    return jax.lax.psum(jax.lax.psum_scatter(y, DATA_AXIS, tiled=True), MODEL_AXIS)
