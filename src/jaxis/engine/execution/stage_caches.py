"""The caches of pipeline stages: as many blocks and slots in each, so that one block table serves all."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax
from jax.sharding import NamedSharding

from jaxis.engine.execution.cache_memory import available_bytes, cache_memory
from jaxis.engine.execution.cache_specs import own_cache_specs
from jaxis.engine.execution.kv_cache import CachePlan, on_devices, plan_caches, unit_bytes
from jaxis.layers.kv_cache_spec import CacheSpec
from jaxis.layers.state_cache_spec import StateCacheSpec

if TYPE_CHECKING:
    from jaxis.config import VllmConfig
    from jaxis.layers.module import JaxModule

Specs = Sequence[CacheSpec | StateCacheSpec]


def plan_stage_caches(
    models: Sequence[JaxModule], vllm_config: VllmConfig, meshes: Sequence[jax.sharding.Mesh]
) -> list[CachePlan]:
    """Sizes the caches of all stages.

    Args:
      models: Of the stages, in their order.
      vllm_config: The engine's configuration.
      meshes: Of the stages.

    Returns:
      Each stage's plan. Its structs are its own; the bytes of blocks and slots are those of all stages together.

    Raises:
      EngineError: See `num_cache_blocks`.
    """
    specs = [on_devices(own_cache_specs(model), mesh) for model, mesh in zip(models, meshes, strict=True)]
    whole = plan_caches(_joined(specs), vllm_config, meshes[0], _memory(specs, vllm_config, meshes))
    plans, start = [], 0
    for own, mesh in zip(specs, meshes, strict=True):
        stop = start + len(own)
        structs = jax.tree.map(functools.partial(_on, mesh), whole.structs[start:stop])
        repeated = whole.repeated_heads[start:stop]
        groups = whole.layer_groups[start:stop]
        plans.append(dataclasses.replace(whole, structs=structs, layer_groups=groups, repeated_heads=repeated))
        start = stop
    return plans


def _memory(specs: Sequence[Specs], vllm_config: VllmConfig, meshes: Sequence[jax.sharding.Mesh]) -> int:
    """Bytes of all caches together, of which no stage's part is more than its devices have."""
    is_on_host = meshes[0].devices.flat[0].platform == "cpu"
    if is_on_host or vllm_config.cache_config.kv_cache_memory_bytes is not None:
        return cache_memory(vllm_config, meshes[0])
    of_all, slot_of_all = unit_bytes(_joined(specs), vllm_config, meshes[0])
    most = []
    for own, mesh in zip(specs, meshes, strict=True):
        per_block, per_slot = unit_bytes(own, vllm_config, mesh)
        # Of whatever the memory is divided into, the stage has at most this share.
        shares = [num_bytes / of_all[span] for span, num_bytes in per_block.items()]
        shares += [per_slot / slot_of_all] if per_slot else []
        if shares:
            most.append(int(available_bytes(mesh) / max(shares)))
    return min(most)


def _joined(specs: Sequence[Specs]) -> list[CacheSpec | StateCacheSpec]:
    return [spec for own in specs for spec in own]


def _on(mesh: jax.sharding.Mesh, struct: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """An array of the same shape and sharding on other devices."""
    assert isinstance(struct.sharding, NamedSharding)
    return jax.ShapeDtypeStruct(struct.shape, struct.dtype, sharding=NamedSharding(mesh, struct.sharding.spec))
