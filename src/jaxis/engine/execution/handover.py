"""The handover of hidden states from one pipeline stage's devices to the next stage's, on this host or on another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxis.engine.execution.rank_programs import RankPrograms
from jaxis.parallel.mesh import MESH_AXES, MODEL_AXIS

STAGE_AXIS = "stage"

HandOn = Callable[[jax.Array | None], jax.Array]
"""Takes the hidden states of a stage, or None if another host has that stage. Returns them on the next stage's devices;
if another host has those, it returns an array that is ready once the hidden states were sent."""


class Handover:
    """The link from the devices of one stage to those of the next stage, as many.

    Between hosts, one program on the devices of both stages moves the hidden states. All hosts of the two stages
    dispatch the program, in the order in which the leader sends steps, since devices in it wait for the devices that
    they exchange with.

    Attributes:
      mesh: The devices of both stages, those of the first stage before those of the second.
    """

    def __init__(self, sender: Mesh, receiver: Mesh) -> None:
        self._receiver = receiver
        self.mesh = Mesh(np.stack([sender.devices, receiver.devices]), (STAGE_AXIS, *MESH_AXES))
        self._is_here = len(self.mesh.local_devices) == self.mesh.size

    def compile(self, hidden: jax.ShapeDtypeStruct) -> HandOn:
        """Returns a function that hands hidden states on; `hidden` is their struct on either stage's data ranks."""
        receiving = RankPrograms(self._receiver).sharding
        if self._is_here:
            return lambda given: jax.device_put(given, receiving)
        divided = (STAGE_AXIS, *receiving.spec)
        sharding = NamedSharding(self.mesh, PartitionSpec(divided))
        shape = (2 * hidden.shape[0], *hidden.shape[1:])
        both = jax.ShapeDtypeStruct(shape, hidden.dtype, sharding=sharding)
        moved = jax.shard_map(_move, mesh=self.mesh, in_specs=sharding.spec, out_specs=sharding.spec, check_vma=False)
        program = jax.jit(moved).lower(both).compile()
        own = list(self._receiver.local_devices)
        # The receivers' half of the operand, which the program does not read.
        unread = [jnp.zeros(receiving.shard_shape(hidden.shape), hidden.dtype, device=device) for device in own]

        def hand_on(given: jax.Array | None) -> jax.Array:
            outgoing = [] if given is None else _parts(given)
            result = program(jax.make_array_from_single_device_arrays(shape, sharding, [*outgoing, *unread]))
            if not own:
                return result
            received = [part for part in _parts(result) if part.device in own]
            return jax.make_array_from_single_device_arrays(hidden.shape, receiving, received)

        return hand_on


def _parts(array: jax.Array) -> Sequence[jax.Array]:
    return [shard.data for shard in array.addressable_shards]


def _move(hidden: jax.Array) -> jax.Array:
    """Moves hidden states from the devices of the first stage to those of the second.

    Hidden states are whole on each device of a data rank. Each device sends its share, and the receivers join the
    shares, so that nothing crosses the network twice.
    """
    num_devices, size = jax.lax.axis_size(MODEL_AXIS), hidden.shape[-1]
    if num_devices == 1 or size % num_devices:
        return _send(hidden)
    own = size // num_devices
    share = jax.lax.dynamic_slice_in_dim(hidden, jax.lax.axis_index(MODEL_AXIS) * own, own, axis=-1)
    return jax.lax.all_gather(_send(share), MODEL_AXIS, axis=hidden.ndim - 1, tiled=True)


def _send(x: Any) -> jax.Array:
    return jax.lax.ppermute(x, STAGE_AXIS, [(0, 1)])
