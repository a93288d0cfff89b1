"""The caches of pipeline stages: as many blocks and slots in each, so that one block table serves all.

Every host computes the plan of all stages, though it need not have their models, so that all hosts come to the same
plan.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax
from jax.sharding import NamedSharding

from jaxis.config.attention_span import AttentionSpan
from jaxis.engine.execution.cache_memory import available_bytes
from jaxis.engine.execution.cache_specs import cache_specs
from jaxis.engine.execution.kv_cache import CachePlan, on_devices, plan_caches, stage_share, unit_bytes
from jaxis.layers.kv_cache_spec import CacheSpec
from jaxis.layers.state_cache_spec import StateCacheSpec
from jaxis.models.common.stage_model import cache_entries
from jaxis.models.model_loader import construct_abstractly
from jaxis.parallel.mesh import MODEL_AXIS
from jaxis.parallel.stages import Stage

if TYPE_CHECKING:
    from jaxis.config import VllmConfig
    from jaxis.layers.module import JaxModule

Specs = Sequence[CacheSpec | StateCacheSpec]


def stage_cache_specs(
    models: Sequence[JaxModule], vllm_config: VllmConfig, meshes: Sequence[jax.sharding.Mesh]
) -> list[Specs]:
    """Returns, for each stage, the specs of its layers that cache something.

    `models` are those of this host's stages; `meshes` are those of all stages.
    """
    if len(meshes) == 1:
        return [on_devices(cache_specs(models[0], vllm_config), meshes[0])]
    with jax.set_mesh(meshes[0]):
        model = construct_abstractly(vllm_config, check_config=False)
    specs = on_devices(cache_specs(model, vllm_config), meshes[0])
    return [[specs[i] for i in cache_entries(model, Stage(index, len(meshes)))] for index in range(len(meshes))]


def most_cache_bytes(specs: Sequence[Specs], vllm_config: VllmConfig, meshes: Sequence[jax.sharding.Mesh]) -> int:
    """Returns the bytes that all caches of all hosts may take, given this host's memory for its own part of them.

    `specs` and `meshes` are those of all stages.
    """
    of_all = unit_bytes(_joined(specs), vllm_config, meshes[0])
    own = [(caches, mesh) for caches, mesh in zip(specs, meshes, strict=True) if mesh.local_devices]
    # The devices of a CPU have one memory.
    is_on_host = meshes[0].devices.flat[0].platform == "cpu"
    most = []
    for group in [own] if is_on_host else [[each] for each in own]:
        per_block: defaultdict[AttentionSpan, float] = defaultdict(float)
        per_slot = 0.0
        for caches, mesh in group:
            part = len(mesh.local_devices) / mesh.size
            of_stage = unit_bytes(caches, vllm_config, mesh)
            for span, num_bytes in of_stage[0].items():
                per_block[span] += part * num_bytes
            per_slot += part * of_stage[1]
        if share := stage_share((per_block, per_slot), of_all):
            most.append(int(available_bytes(group[0][1]) / share))
    return min(most, default=sys.maxsize)  # this host may have layers without caches only


def plan_stage_caches(
    specs: Sequence[Specs], vllm_config: VllmConfig, meshes: Sequence[jax.sharding.Mesh], memory: int
) -> list[CachePlan]:
    """Sizes the caches of all stages, for `memory` bytes of all caches on all hosts.

    Returns each stage's plan. A plan's structs are those of its stage; its bytes of blocks and slots are those of all
    stages together.

    Raises:
      EngineError: The memory does not suffice; see `num_cache_blocks`.
    """
    share = sum(len(mesh.local_devices) for mesh in meshes) / sum(mesh.shape[MODEL_AXIS] for mesh in meshes)
    whole = plan_caches(_joined(specs), vllm_config, meshes[0], memory, share)
    plans, start = [], 0
    for own, mesh in zip(specs, meshes, strict=True):
        stop = start + len(own)
        structs = jax.tree.map(functools.partial(_on, mesh), whole.structs[start:stop])
        repeated = whole.repeated_heads[start:stop]
        groups = whole.layer_groups[start:stop]
        plans.append(dataclasses.replace(whole, structs=structs, layer_groups=groups, repeated_heads=repeated))
        start = stop
    return plans


def _joined(specs: Sequence[Specs]) -> list[CacheSpec | StateCacheSpec]:
    return [spec for own in specs for spec in own]


def _on(mesh: jax.sharding.Mesh, struct: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    assert isinstance(struct.sharding, NamedSharding)
    return jax.ShapeDtypeStruct(struct.shape, struct.dtype, sharding=NamedSharding(mesh, struct.sharding.spec))
