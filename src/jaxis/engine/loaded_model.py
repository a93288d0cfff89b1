"""A model whose weights are on the devices, and what its executor is made of."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import jax
from flax import nnx

from jaxis.engine.execution.model_arrays import bytes_on_devices
from jaxis.engine.execution.model_size import model_size
from jaxis.engine.execution.pipeline_executor import StageParts
from jaxis.engine.execution.stage_caches import Specs, most_cache_bytes, plan_stage_caches, stage_cache_specs
from jaxis.parallel.stages import first_host, own_stages

if TYPE_CHECKING:
    from jaxis.config import VllmConfig
    from jaxis.layers.module import JaxModule


@dataclass(frozen=True)
class LoadedModel:
    """A model on its devices.

    Attributes:
      vllm_config: The engine's configuration.
      meshes: Of all pipeline stages.
      models: That of each stage that this host has; their weights are loaded.
      on_compile: Shows that a step waits for a program; see `Executor`.
    """

    vllm_config: VllmConfig
    meshes: Sequence[jax.sharding.Mesh]
    models: Sequence[JaxModule]
    on_compile: Callable[[Hashable], AbstractContextManager[None]]

    @functools.cached_property
    def _cache_specs(self) -> list[Specs]:
        return stage_cache_specs(self.models, self.vllm_config, self.meshes)

    @property
    def most_cache_bytes(self) -> int:
        """See `stage_caches.most_cache_bytes`."""
        return most_cache_bytes(self._cache_specs, self.vllm_config, self.meshes)

    def first_share(self, rank: int) -> tuple[int, int]:
        """The parameters, and their bytes on all devices together, of the stages that no host of a lower rank has."""
        own = zip(self.models, own_stages(self.meshes), strict=True)
        models = [model for model, stage in own if first_host(self.meshes[stage.index]) == rank]
        arrays = [array for model in models for array in jax.tree.leaves(nnx.state(model))]
        return model_size(*models)[0], bytes_on_devices(arrays)

    def parts(self, cache_bytes: int | None) -> list[StageParts]:
        """What each of this host's stages is made of.

        Args:
          cache_bytes: Of all caches on all hosts; None: those that were given, or those that are there on this one.
        """
        if cache_bytes is None:
            cache_bytes = self.vllm_config.cache_config.kv_cache_memory_bytes or self.most_cache_bytes
        plans = plan_stage_caches(self._cache_specs, self.vllm_config, self.meshes, cache_bytes)
        return [
            StageParts(model, self.meshes[stage.index], plans[stage.index], stage)
            for model, stage in zip(self.models, own_stages(self.meshes), strict=True)
        ]
