"""Runs a model that is divided into pipeline stages: each has its own devices, and a step goes from one to the next.

A host has the stages whose devices, or some of whose devices, are its own. All hosts dispatch the same steps in the
same order, each its own stages' programs; what passes between hosts are hidden states (see `Handover`).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxis.engine.execution.executor import DeviceExecutor
from jaxis.engine.execution.kv_cache import CachePlan
from jaxis.engine.execution.program_key import Compiled, ProgramKey, RunsOn
from jaxis.engine.execution.rank_programs import RankPrograms
from jaxis.parallel.mesh import MESH_AXES, MODEL_AXIS

# Hands hidden states on from one pipeline stage's devices to the next one's, on this host or on another.


STAGE_AXIS = "stage"

HandOn = Callable[[jax.Array | None], jax.Array]
"""Takes the hidden states of a stage, or None where another host has that stage. Returns them on the next stage's
devices or, where another host has those, returns an array that is ready once the hidden states were sent."""


class Handover:
    """From the devices of one stage to those of the next.

    Between hosts, one program on the devices of both stages moves the hidden states. All hosts of the two stages
    dispatch the program, in the order in which the leader sends steps: in it, devices wait for the devices that they
    exchange with.

    Attributes:
      mesh: The devices of both stages, those of the first one before those of the second.

    Args:
      sender: The devices of the first stage.
      receiver: The devices of the second stage, as many.
    """

    def __init__(self, sender: Mesh, receiver: Mesh) -> None:
        self._receiver = receiver
        self.mesh = Mesh(np.stack([sender.devices, receiver.devices]), (STAGE_AXIS, *MESH_AXES))
        self._is_here = len(self.mesh.local_devices) == self.mesh.size

    def compile(self, hidden: jax.ShapeDtypeStruct) -> HandOn:
        """A function that hands hidden states on.

        Args:
          hidden: Those of either stage, of all data ranks.
        """
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
        # The program does not read the receivers' half of its operand.
        room = [jnp.zeros(receiving.shard_shape(hidden.shape), hidden.dtype, device=device) for device in own]

        def hand_on(given: jax.Array | None) -> jax.Array:
            outgoing = [] if given is None else _parts(given)
            result = program(jax.make_array_from_single_device_arrays(shape, sharding, [*outgoing, *room]))
            if not own:
                return result
            received = [part for part in _parts(result) if part.device in own]
            return jax.make_array_from_single_device_arrays(hidden.shape, receiving, received)

        return hand_on


def _parts(array: jax.Array) -> Sequence[jax.Array]:
    """What each of this host's devices has of an array."""
    return [shard.data for shard in array.addressable_shards]


def _move(hidden: jax.Array) -> jax.Array:
    """What the devices of the first stage have, on those of the second.

    Hidden states are whole on each device of a data rank: each device sends its share, and the receivers put the shares
    together, so that nothing crosses the network twice.
    """
    num_devices, size = jax.lax.axis_size(MODEL_AXIS), hidden.shape[-1]
    if num_devices == 1 or size % num_devices:
        return _send(hidden)
    own = size // num_devices
    share = jax.lax.dynamic_slice_in_dim(hidden, jax.lax.axis_index(MODEL_AXIS) * own, own, axis=-1)
    return jax.lax.all_gather(_send(share), MODEL_AXIS, axis=hidden.ndim - 1, tiled=True)


def _send(x: Any) -> jax.Array:
    return jax.lax.ppermute(x, STAGE_AXIS, [(0, 1)])


class PipelineExecutor:
    """The `Executor` of this host's pipeline stages.

    Stages do not wait for each other here: a stage begins with the next step when it has handed on its hidden states.
    What a stage keeps from one step to the next is in its caches alone. With several stages, a step takes no tokens
    that another one samples, which the last stage has: the scheduler waits for those tokens.

    Attributes:
      stages: The executor of each, in their order.

    Args:
      stages: The executors of this host's stages; at least one.
      meshes: Of all stages, those of other hosts included.
    """

    def __init__(self, stages: Sequence[DeviceExecutor], meshes: Sequence[jax.sharding.Mesh]) -> None:
        self.stages = stages
        # The links to each of this host's stages, and on from the last stage here.
        self._to_stages = [_handover(meshes, executor.stage.index) for executor in stages]
        self._onwards = _handover(meshes, stages[-1].stage.index + 1)

    @property
    def plan(self) -> CachePlan:
        """See `Executor`."""
        plans = [executor.plan for executor in self.stages]
        return dataclasses.replace(
            plans[-1],
            structs=list(itertools.chain.from_iterable(plan.structs for plan in plans)),
            layer_groups=list(itertools.chain.from_iterable(plan.layer_groups for plan in plans)),
            repeated_heads=list(itertools.chain.from_iterable(plan.repeated_heads for plan in plans)),
        )

    @property
    def num_stages(self) -> int:
        """See `Executor`."""
        return self._last.num_stages

    @property
    def newest(self) -> Any:
        """See `Executor`."""
        return self._last.newest

    def compile(self, key: ProgramKey) -> Compiled:
        """See `Executor`; of a program that several stages run, a `_StagePrograms` in its place."""
        if key.runs_on is RunsOn.LAST_STAGE:
            return self._last.compile(key) if self._last.stage.is_last else _on_another_host
        programs = [executor.compile(key) for executor in self.stages]
        if key.runs_on is RunsOn.EACH_STAGE:
            return _StagePrograms(programs, [], None)
        hidden = self._last.context.hidden_struct(key.num_tokens)
        links = [link and link.compile(hidden) for link in self._to_stages]
        return _StagePrograms(programs, links, self._onwards and self._onwards.compile(hidden))

    def run(self, key: ProgramKey, program: Compiled, *operands: Any) -> Any:
        """See `Executor`."""
        if not isinstance(program, _StagePrograms):
            return self._last.run(key, program, *operands)
        if key.runs_on is RunsOn.EACH_STAGE:
            parts = zip(self.stages, program.of_stages, strict=True)
            results = [executor.run(key, of_stage, *operands) for executor, of_stage in parts]
            return [array for result in results if result is not None for array in result]
        hidden = None
        for executor, of_stage, link in zip(self.stages, program.of_stages, program.links, strict=True):
            state = executor.state
            state.handed_on = None if link is None else link(hidden)
            executor.run(key, of_stage, *operands)
            hidden, state.handed_on = state.hidden, None
            if executor is not self._last:
                state.forget_hidden()
        if program.onwards is not None:
            # In the place of the hidden states: arrays that are ready once this host's stages are.
            self._last.state.hidden = program.onwards(hidden)
        return None

    def recover(self) -> None:
        """See `Executor`."""
        for executor in self.stages:
            executor.recover()

    def close(self) -> None:
        """See `Executor`."""
        for executor in self.stages:
            executor.close()

    @property
    def _last(self) -> DeviceExecutor:
        """Of this host's stages, the last."""
        return self.stages[-1]


class _StagePrograms(NamedTuple):
    """A program of each stage, and the links over which hidden states come and go.

    Only programs in which stages hand on hidden states have links. The first stage's link is None.
    """

    of_stages: Sequence[Compiled]
    links: Sequence[HandOn | None]
    onwards: HandOn | None

    def __call__(self, *_: object) -> None:
        raise TypeError("the stages' programs are called one after the other")


def _handover(meshes: Sequence[jax.sharding.Mesh], index: int) -> Handover | None:
    """From the stage before to the stage of this index, if there are both."""
    return Handover(meshes[index - 1], meshes[index]) if 0 < index < len(meshes) else None


def _on_another_host(*_: object) -> None:
    """In the place of a program of the last stage where another host has that."""
    raise RuntimeError("another host has the last stage")
