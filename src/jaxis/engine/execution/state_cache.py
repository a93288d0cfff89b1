"""The cache of recurrent states, of running sequences and of kept prefixes: the number of slots, and their shapes."""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
from jax.sharding import AbstractMesh, Mesh
from jax.typing import DTypeLike

from jaxis.config import VllmConfig
from jaxis.engine.scheduling.state_slots import DRAFT_SLOTS, MIN_SLOTS
from jaxis.errors import EngineError
from jaxis.host.byte_size import human_bytes
from jaxis.layers.state_cache_spec import StateCacheSpec
from jaxis.parallel.mesh import DATA_AXIS, MODEL_AXIS, logical_sharding

# Slots for the states of ended conversations. Each running sequence has two more: its own, and its newest kept state's.
KEPT_SLOTS = 64
# The share of the caches' memory that states may take if there are also layers with attention.
STATE_SHARE = 0.5


def slot_bytes(specs: Sequence[StateCacheSpec], dtype: DTypeLike, mesh: Mesh | AbstractMesh) -> int:
    """Returns the bytes of a slot over all layers and devices of a data rank.

    A state that cannot be divided is whole on each device. The mesh's devices need not exist. `specs` has one spec for
    each layer with a state; `dtype` is that of the activations.
    """
    structs = [struct for spec in specs for struct in state_structs(spec, 1, dtype, mesh)]
    shards = [(struct.sharding.shard_shape(struct.shape), struct.dtype.itemsize) for struct in structs]
    return mesh.shape[MODEL_AXIS] * sum(math.prod(shape) * itemsize for shape, itemsize in shards)


def useful_slots(vllm_config: VllmConfig) -> int:
    """Returns the most slots that could be used."""
    num_seqs = vllm_config.scheduler_config.max_num_seqs
    speculative = vllm_config.speculative_config
    drafts = speculative is not None and speculative.num_speculative_tokens > 0
    of_drafts = DRAFT_SLOTS * num_seqs if drafts else 0
    if not vllm_config.cache_config.enable_prefix_caching:
        return max(num_seqs + of_drafts, MIN_SLOTS)
    return 2 * num_seqs + of_drafts + KEPT_SLOTS


def num_state_slots(vllm_config: VllmConfig, bytes_per_slot: int, memory: int, *, attends: bool) -> int:
    """Returns the number of slots to allocate. If it is less than `max_num_seqs`, sequences wait for a slot.

    Args:
      vllm_config: The engine's configuration, of which the sizes are read.
      bytes_per_slot: Bytes of a slot over all layers; 0 if none has a state, which needs no slots.
      memory: Bytes of all caches of a data rank.
      attends: True if there are layers with attention, which need memory as well.

    Raises:
      EngineError: The memory does not suffice for a sequence.
    """
    if not bytes_per_slot:
        return 0
    available = int(memory * STATE_SHARE) if attends else memory
    slots = min(useful_slots(vllm_config), available // bytes_per_slot)
    if slots < MIN_SLOTS:
        raise EngineError(
            f"the recurrent state of a sequence takes {human_bytes(bytes_per_slot)}, and {human_bytes(available)} are "
            f"available for the {MIN_SLOTS} that are needed at least: free memory, or give a larger kv_cache_memory"
        )
    return slots


def state_structs(
    spec: StateCacheSpec, num_slots: int, dtype: DTypeLike, mesh: Mesh | AbstractMesh
) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Returns the shapes and shardings of a layer's state, [D * num_slots, ...] each for D data ranks."""
    all_slots = mesh.shape[DATA_AXIS] * num_slots
    return tuple(
        jax.ShapeDtypeStruct(
            (all_slots, *array.shape),
            array.dtype_in(dtype),
            sharding=logical_sharding(mesh, ("blocks", *array.axes), (all_slots, *array.shape)),
        )
        for array in spec
    )
