"""The programs that a Runner would compile on a mesh, lowered from shapes alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from jaxis.compilation.abstract_model import abstract_model
from jaxis.config import VllmConfig
from jaxis.engine.execution.kv_cache import plan_kv_caches
from jaxis.engine.execution.model_arrays import ModelArrays, hidden_state_struct
from jaxis.engine.execution.program_context import ProgramContext
from jaxis.engine.execution.program_key import lower
from jaxis.engine.execution.sampling_batch import SamplerFeatures
from jaxis.engine.execution.step_programs import ForwardKey, SampleKey
from jaxis.engine.execution.step_shapes import StepShapes
from jaxis.layers.module import JaxModule, named_parameters
from jaxis.layers.weight_bytes import logical_axes
from jaxis.parallel.mesh import EXPERT_AXES, MESH_AXES


def target_mesh(devices: Sequence[Any], data_parallel_size: int = 1) -> Mesh:
    """Makes jaxis's mesh of these devices: those of a data rank share each layer."""
    grid = np.asarray(devices).reshape(data_parallel_size, -1)
    return Mesh(grid, MESH_AXES, axis_types=(AxisType.Auto,) * 2)


class AbstractRunner:
    """A Runner's programs without its arrays; the model's parameters are ShapeDtypeStructs.

    Attributes:
      weights: All of the model's arrays, as the programs take them.
      layer_weights: Weights that a step reads whole: all but experts, of which it reads those that tokens are routed
        to, and embedding tables, of which it reads rows.
      max_model_len: The configured length, shortened if the cache cannot hold a sequence that long.
    """

    def __init__(self, vllm_config: VllmConfig, mesh: Mesh) -> None:
        """Constructs the model and sizes the caches; raises as `Runner` does.

        The configuration has the caches' memory: absent devices cannot be asked for theirs.
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
        self._context = ProgramContext(
            model=arrays,
            mesh=mesh,
            caches=caches.structs,
            layer_groups=caches.layer_groups,
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
        """Lowers the model over a step of so many tokens."""
        return lower(ForwardKey(self._shapes.of(num_tokens)), self._context)

    def num_sequences(self, num_tokens: int) -> int:
        """Returns the most sequences that a step of so many tokens samples for, R."""
        return self._shapes.of(num_tokens).num_seqs

    def sampler(self, num_tokens: int, features: SamplerFeatures | None = None) -> jax.stages.Lowered:
        """Lowers logits and sampling of a step of so many tokens; by default, each sequence's most likely token."""
        key = SampleKey(self._shapes.of(num_tokens).num_seqs, features or SamplerFeatures())
        return lower(key, self._context)


def _weights_with(model: JaxModule, wanted: Callable[[str | None], bool]) -> list[Any]:
    """Returns the arrays of the parameters whose first logical axis is wanted."""
    parameters = {id(param): param for _, param in named_parameters(model)}.values()
    chosen = [param for param in parameters if wanted(next(iter(logical_axes(param)), None))]
    return [array for param in chosen for array in jax.tree.leaves(param.get_value())]
