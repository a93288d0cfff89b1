"""A model whose weights are on the devices, from which an executor is made."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import jax
from flax import nnx

from jaxis.engine.execution.executor import DeviceExecutor, Executor
from jaxis.engine.execution.kv_cache import plan_kv_caches
from jaxis.engine.execution.model_arrays import bytes_on_devices
from jaxis.engine.execution.model_size import model_size
from jaxis.engine.execution.pipeline import PipelineExecutor
from jaxis.engine.execution.stage_caches import Specs, most_cache_bytes, plan_stage_caches, stage_cache_specs
from jaxis.parallel.stages import first_host, own_stages

if TYPE_CHECKING:
    from jaxis.config import VllmConfig
    from jaxis.layers.module import JaxModule


@dataclass(frozen=True)
class LoadedModel:
    """A model on its devices.

    Attributes:
      vllm_config: Configuration of the engine.
      meshes: Meshes of all pipeline stages.
      models: Models of this host's stages, with loaded weights.
    """

    vllm_config: VllmConfig
    meshes: Sequence[jax.sharding.Mesh]
    models: Sequence[JaxModule]

    @functools.cached_property
    def _cache_specs(self) -> list[Specs]:
        return stage_cache_specs(self.models, self.vllm_config, self.meshes)

    @property
    def most_cache_bytes(self) -> int:
        """Largest size of the caches, as `stage_caches.most_cache_bytes` computes it."""
        return most_cache_bytes(self._cache_specs, self.vllm_config, self.meshes)

    def first_share(self, rank: int) -> tuple[int, int]:
        """Returns parameters and size, on all devices together, of the stages that no host of a lower rank has."""
        own = zip(self.models, own_stages(self.meshes), strict=True)
        models = [model for model, stage in own if first_host(self.meshes[stage.index]) == rank]
        arrays = [array for model in models for array in jax.tree.leaves(nnx.state(model))]
        return model_size(*models)[0], bytes_on_devices(arrays)

    def executor(self, cache_bytes: int | None = None, num_blocks: int | None = None) -> Executor:
        """Allocates the caches; returns the executor of this host's part of the model.

        Args:
          cache_bytes: Size of all caches on all hosts; None: the requested size, or all free memory of this host.
          num_blocks: Number of blocks, as in `plan_kv_caches`, for a model with one pipeline stage.

        Raises:
          ConfigError: The model's heads cannot be spread over the devices.
          EngineError: No memory for the caches.
        """
        config = self.vllm_config
        if len(self.meshes) == 1:
            [model], [mesh] = self.models, self.meshes
            return DeviceExecutor(config, model, mesh, plan_kv_caches(model, config, mesh, cache_bytes, num_blocks))
        if cache_bytes is None:
            cache_bytes = config.cache_config.kv_cache_memory_bytes or self.most_cache_bytes
        plans = plan_stage_caches(self._cache_specs, config, self.meshes, cache_bytes)
        stages = [
            DeviceExecutor(config, model, self.meshes[stage.index], plans[stage.index], stage)
            for model, stage in zip(self.models, own_stages(self.meshes), strict=True)
        ]
        return PipelineExecutor(stages, self.meshes)
