"""The programs that a Runner would compile on a mesh, lowered from shapes alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from jaxis.config import VllmConfig
from jaxis.engine.execution.kv_cache import plan_kv_caches
from jaxis.engine.execution.model_arrays import ModelArrays, hidden_state_struct
from jaxis.engine.execution.sampling_batch import SamplerFeatures
from jaxis.engine.execution.step_programs import ForwardKey, SampleKey, StepPrograms
from jaxis.engine.execution.step_shapes import StepShapes
from jaxis.layers.module import JaxModule, named_parameters
from jaxis.layers.weight_bytes import logical_axes
from jaxis.parallel.mesh import EXPERT_AXES, MESH_AXES
from jaxis.planning.abstract_model import abstract_model


def target_mesh(devices: Sequence[Any], data_parallel_size: int = 1) -> Mesh:
    """The mesh that jaxis makes of these devices: those of a data rank share each layer."""
    grid = np.asarray(devices).reshape(data_parallel_size, -1)
    return Mesh(grid, MESH_AXES, axis_types=(AxisType.Auto,) * 2)


class AbstractRunner:
    """A Runner's programs without its arrays.

    Attributes:
      model: Its parameters are ShapeDtypeStructs.
      weights: All of the model's arrays, as the programs take them.
      layer_weights: Those that a step reads whole: all but experts, of which it reads those that tokens go to, and
        tables of embeddings, of which it reads rows.
      expert_weights: The stacks of experts.
      head_weights: Those that the sampler's programs take.
      caches: The KV caches.
      vocab_size: V.
      hidden_size: E.
      max_model_len: The configured one, shortened if the cache cannot hold a sequence that long.
    """

    def __init__(self, vllm_config: VllmConfig, mesh: Mesh) -> None:
        """Constructs the model and sizes the caches.

        Args:
          vllm_config: The engine's configuration, with the caches' memory: nobody can ask devices that are not there.
          mesh: The devices, of a topology or real.

        Raises:
          ConfigError, EngineError: As `Runner` does.
        """
        self.model = abstract_model(vllm_config, mesh)
        caches = plan_kv_caches(self.model, vllm_config, mesh)
        self.caches, self.max_model_len = jax.tree.leaves(caches.structs), caches.max_model_len
        with jax.set_mesh(mesh):
            arrays = ModelArrays(self.model, hidden_state_struct(vllm_config, mesh))
        self.weights: list[Any] = arrays.arrays
        self.head_weights: list[Any] = arrays.head_arrays
        self.layer_weights = _weights_with(self.model, lambda axis: axis not in ("vocab", *EXPERT_AXES))
        self.expert_weights = _weights_with(self.model, lambda axis: axis in EXPERT_AXES)
        text_config = vllm_config.model_config.hf_config.get_text_config()
        self.vocab_size, self.hidden_size = text_config["vocab_size"], text_config["hidden_size"]
        self._programs = StepPrograms(
            arrays,
            mesh,
            caches=caches.structs,
            max_num_seqs=vllm_config.scheduler_config.max_num_seqs,
            vocab_size=self.vocab_size,
        )
        self._shapes = StepShapes(
            vllm_config,
            caches.num_blocks,
            self.max_model_len,
            has_states=caches.num_state_slots is not None,
            compiles_fast=False,
        )

    def forward(self, num_tokens: int) -> jax.stages.Lowered:
        """The model over a step of so many tokens."""
        return self._programs.lower(ForwardKey(self._shapes.of(num_tokens)))

    def num_sequences(self, num_tokens: int) -> int:
        """The most sequences that a step of so many tokens samples for, R."""
        return self._shapes.of(num_tokens).num_seqs

    def sampler(self, num_tokens: int, features: SamplerFeatures | None = None) -> jax.stages.Lowered:
        """Logits and sampling of a step of so many tokens; by default, each sequence's most likely token."""
        return self._programs.lower(SampleKey(self._shapes.of(num_tokens).num_seqs, features or SamplerFeatures()))


def _weights_with(model: JaxModule, wanted: Callable[[str | None], bool]) -> list[Any]:
    """The arrays of the parameters whose first logical axis is wanted."""
    parameters = {id(param): param for _, param in named_parameters(model)}.values()
    chosen = [param for param in parameters if wanted(next(iter(logical_axes(param)), None))]
    return [array for param in chosen for array in jax.tree.leaves(param.get_value())]


def bytes_per_device(arrays: Iterable[Any]) -> int:
    """Bytes of arrays with shardings, real or abstract, that each device holds."""
    total = 0
    for array in arrays:
        shape = array.shape if array.sharding is None else array.sharding.shard_shape(array.shape)
        total += math.prod(shape) * array.dtype.itemsize
    return total
