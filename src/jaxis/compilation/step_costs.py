"""What the programs of a step cost on a machine, beside the least that they could read from its memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from jaxis.compilation.abstract_model import abstract_model
from jaxis.compilation.program_text import ProgramText, read_text
from jaxis.config import VllmConfig
from jaxis.config.expert_counts import experts_per_token
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

# A compiled program's memory, and what its text says that it costs.


@dataclass(frozen=True)
class ProgramMemory:
    """Bytes on each device.

    Attributes:
      arguments: Of its arguments.
      outputs: Of its results, those that are updated arguments included.
      aliased: Of the arguments that it updates in place.
      temporaries: Of everything between.
      code: Of its instructions.
    """

    arguments: int
    outputs: int
    aliased: int
    temporaries: int
    code: int

    @property
    def total(self) -> int:
        """What it needs while it runs."""
        return self.arguments + self.outputs - self.aliased + self.temporaries + self.code


@dataclass(frozen=True)
class CompiledProgram:
    """A program's costs on each device.

    Attributes:
      memory: What it takes.
      text: What its instructions do.
    """

    memory: ProgramMemory
    text: ProgramText


def read_program(compiled: jax.stages.Compiled) -> CompiledProgram:
    """The costs of a program that was compiled for a TPU or GPU."""
    sizes, text = compiled.memory_analysis(), compiled.as_text()
    assert sizes is not None
    assert text is not None
    memory = ProgramMemory(
        arguments=sizes.argument_size_in_bytes,
        outputs=sizes.output_size_in_bytes,
        aliased=sizes.alias_size_in_bytes,
        temporaries=sizes.temp_size_in_bytes,
        code=sizes.generated_code_size_in_bytes,
    )
    return CompiledProgram(memory, read_text(text))


# The programs that a Runner would compile on a mesh, lowered from shapes alone.


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
        """The model over a step of so many tokens."""
        return lower(ForwardKey(self._shapes.of(num_tokens)), self._context)

    def num_sequences(self, num_tokens: int) -> int:
        """The most sequences that a step of so many tokens samples for, R."""
        return self._shapes.of(num_tokens).num_seqs

    def sampler(self, num_tokens: int, features: SamplerFeatures | None = None) -> jax.stages.Lowered:
        """Logits and sampling of a step of so many tokens; by default, each sequence's most likely token."""
        key = SampleKey(self._shapes.of(num_tokens).num_seqs, features or SamplerFeatures())
        return lower(key, self._context)


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


@dataclass(frozen=True)
class WeightReads:
    """Bytes of weights, on each device.

    Attributes:
      layers: Read whole by every step.
      experts: Of all experts.
      num_experts: Of a layer; 0 without experts.
      experts_per_token: Of a layer.
      head: Read whole by every sampler.
    """

    layers: int
    experts: int
    num_experts: int
    experts_per_token: int
    head: int

    def of_step(self, num_tokens: int) -> int:
        """The most that the forward program of so many tokens has to read: no two tokens share an expert."""
        if not self.num_experts:
            return self.layers
        hit = min(self.num_experts, num_tokens * self.experts_per_token)
        return self.layers + self.experts * hit // self.num_experts


@dataclass(frozen=True)
class StepCosts:
    """The two programs of a step of T tokens, on each device.

    Attributes:
      num_tokens: T.
      num_sequences: R.
      forward: The model.
      sampler: Logits and sampling.
    """

    num_tokens: int
    num_sequences: int
    forward: CompiledProgram
    sampler: CompiledProgram


class StepCompiler:
    """Compiles a model's programs for devices, and reads what they cost.

    Attributes:
      runner: Lowers the programs.
      reads: The weights that they have to read.
      cache_bytes: Of each layer's KV cache, on each device.
      num_devices: Devices that share each layer.
    """

    def __init__(self, vllm_config: VllmConfig, devices: Sequence[Any]) -> None:
        """Constructs the model; see `AbstractRunner` for the arguments and errors."""
        mesh = target_mesh(devices, vllm_config.parallel_config.data_parallel_size)
        self.runner = runner = AbstractRunner(vllm_config, mesh)
        self.num_devices = len(devices)
        text_config = vllm_config.model_config.hf_config.get_text_config()
        self.reads = WeightReads(
            layers=bytes_per_device(runner.layer_weights),
            experts=bytes_per_device(runner.expert_weights),
            num_experts=runner.expert_weights[0].shape[0] if runner.expert_weights else 0,
            experts_per_token=experts_per_token(text_config),
            head=bytes_per_device(runner.head_weights),
        )
        self.cache_bytes = [bytes_per_device([cache]) for cache in runner.caches]

    def forward(self, num_tokens: int) -> CompiledProgram:
        """The model over a step of so many tokens."""
        return read_program(self.runner.forward(num_tokens).compile())

    def sampler(self, num_tokens: int) -> CompiledProgram:
        """Logits of a step of so many tokens, and each sequence's most likely token."""
        return read_program(self.runner.sampler(num_tokens).compile())

    def step(self, num_tokens: int) -> StepCosts:
        """Both programs."""
        num_sequences = self.runner.num_sequences(num_tokens)
        return StepCosts(num_tokens, num_sequences, self.forward(num_tokens), self.sampler(num_tokens))
