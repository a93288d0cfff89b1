"""What the programs of a step cost on a machine, beside the least that they could read from its memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jaxis.config import VllmConfig
from jaxis.config.expert_counts import experts_per_token
from jaxis.planning.abstract_runner import AbstractRunner, bytes_per_device, target_mesh
from jaxis.planning.compiled_program import CompiledProgram, read_program


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
