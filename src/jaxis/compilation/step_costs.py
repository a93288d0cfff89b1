"""The costs of a step's programs on a machine, beside the fewest bytes that they could read from its memory."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from jaxis.compilation.abstract_runner import AbstractRunner, target_mesh
from jaxis.compilation.compiled_program import CompiledProgram, read_program
from jaxis.config import VllmConfig
from jaxis.config.expert_counts import experts_per_token


def bytes_per_device(arrays: Iterable[Any]) -> int:
    """Counts the bytes of arrays with shardings, real or abstract, that each device holds."""
    total = 0
    for array in arrays:
        shape = array.shape if array.sharding is None else array.sharding.shard_shape(array.shape)
        total += math.prod(shape) * array.dtype.itemsize
    return total


@dataclass(frozen=True)
class WeightReads:
    """Bytes of weights on each device: read by every step, of all experts, and read by every sampler."""

    layers: int
    experts: int
    num_experts: int
    experts_per_token: int
    head: int

    def of_step(self, num_tokens: int) -> int:
        """Returns the most that the forward program of so many tokens has to read: no two tokens share an expert."""
        if not self.num_experts:
            return self.layers
        hit = min(self.num_experts, num_tokens * self.experts_per_token)
        return self.layers + self.experts * hit // self.num_experts


@dataclass(frozen=True)
class StepCosts:
    """The forward and the sampler's program of a step of T tokens and R sequences, on each device."""

    num_tokens: int
    num_sequences: int
    forward: CompiledProgram
    sampler: CompiledProgram


class StepCompiler:
    """Compiles a model's programs for devices, and reads their costs; `cache_bytes` is each layer's KV cache on each
    device.
    """

    def __init__(self, vllm_config: VllmConfig, devices: Sequence[Any]) -> None:
        """Constructs the model, with the arguments and errors of `AbstractRunner`."""
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
        """Compiles the model over a step of so many tokens."""
        return read_program(self.runner.forward(num_tokens).compile())

    def sampler(self, num_tokens: int) -> CompiledProgram:
        """Compiles the logits of a step of so many tokens, and each sequence's most likely token."""
        return read_program(self.runner.sampler(num_tokens).compile())

    def step(self, num_tokens: int) -> StepCosts:
        num_sequences = self.runner.num_sequences(num_tokens)
        return StepCosts(num_tokens, num_sequences, self.forward(num_tokens), self.sampler(num_tokens))
