"""The time of steps on a measured machine: the work that a model needs, times the machine's constants."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from jaxis.bench.cost import EMBEDDING, EXPERTS, HEAD, expert_share
from jaxis.compilation.accelerators import Accelerator
from jaxis.engine.engine_config import CPU_DEFAULT_MAX_NUM_BATCHED_TOKENS
from jaxis.engine.memory_account import Width
from jaxis.layers.weight_bytes import StoredWeight
from jaxis.planning.device_model import DeviceModel, device_model
from jaxis.planning.layout import Layout
from jaxis.planning.machine import Machine, at

# Least bits of an element -> the width that it is measured as.
_WIDTHS = ((24, "float32"), (12, "bfloat16"), (6.5, "int8"), (0, "int4"))
_HOST = Accelerator("this", "cpu", "cpu", 0, 0, 1.0, {}, 1.0)


@dataclass(frozen=True)
class Work:
    """The parts of a model that take time, each in units of a constant of `Machine`.

    Attributes:
      layers, experts, head: Elements of matrices by width: those that every token uses, those of experts, of which it
        uses `expert_share`, and those that only sampled tokens use.
      elements: Elements of all matrices, embeddings included, by width.
    """

    part: DeviceModel
    layers: Mapping[str, int]
    experts: Mapping[str, int]
    expert_share: float
    head: Mapping[str, int]
    elements: Mapping[str, int]

    def decode_seconds(self, machine: Machine, batch_size: int, context_len: int) -> float:
        """Computes a step of one token for each of so many requests, which then have `context_len` tokens."""
        positions = np.full(batch_size, context_len - 1)
        context_bytes, _ = self.part.context(positions, is_one_request=False)
        return self._seconds(machine, batch_size, batch_size) + context_bytes * machine.context_byte

    def prefill_seconds(self, machine: Machine, num_tokens: int) -> float:
        """Computes the time of one prompt's steps until its first token."""
        seconds = 0.0
        for start in range(0, num_tokens, CPU_DEFAULT_MAX_NUM_BATCHED_TOKENS):
            rows = min(CPU_DEFAULT_MAX_NUM_BATCHED_TOKENS, num_tokens - start)
            _, flops = self.part.context(np.arange(start, start + rows), is_one_request=True)
            seconds += self._seconds(machine, rows, 1) + flops * machine.attention_flop
        return seconds

    def process_bytes(self, machine: Machine) -> int:
        """Computes the memory of a process beside weights and caches."""
        return int(machine.base_bytes + self.part.num_layers * machine.layer_bytes)

    def start_seconds(self, machine: Machine, num_tokens: int) -> float:
        """Computes the time from the start of the process to the first token of a prompt."""
        loading = sum(count * machine.element_ready[width] for width, count in self.elements.items())
        ready = machine.ready + self.part.num_layers * machine.layer_ready + loading
        return ready + self.prefill_seconds(machine, num_tokens)

    def terms(self) -> dict[str, float]:
        """Returns the units of what every token of a step needs, by the constant that they are multiplied by."""
        return {"step": 1.0, "layer": self.part.num_layers, "state": self.part.state_bytes, **self.layers}

    def _seconds(self, machine: Machine, num_tokens: int, num_sampled: int) -> float:
        """Computes a step without its attention."""
        curves = {"step": machine.step, "layer": machine.layer, "state": machine.state, **machine.products}
        seconds = sum(units * at(curves[name], num_tokens) for name, units in self.terms().items())
        seconds += sum(count * at(curves[width], num_sampled) for width, count in self.head.items())
        if self.experts:
            hit = 1 - (1 - self.expert_share) ** num_tokens
            rows = num_tokens * self.expert_share / hit  # of each expert that any token is routed to
            seconds += sum(hit * count * at(curves[width], rows) for width, count in self.experts.items())
        return seconds


def work_of(width: Width) -> Work:
    """Counts the work of a model on the host. Raises ConfigError as `device_model` does."""
    layout = Layout()
    part = device_model(width, _HOST, layout, width.vllm_config.model_config.dtype)
    weights = [weight for weight in width.weights_on(layout.mesh()) if weight.device_elements]
    is_tied = not any(HEAD in weight.name for weight in weights)
    heads = [weight for weight in weights if HEAD in weight.name or (is_tied and EMBEDDING in weight.name)]
    experts = [weight for weight in weights if EXPERTS in weight.name]
    left_out = {weight.name for weight in (*heads, *experts)}
    layers = [weight for weight in weights if weight.name not in left_out and EMBEDDING not in weight.name]
    config = width.vllm_config.model_config.hf_config.get_text_config()
    return Work(part, _by_width(layers), _by_width(experts), expert_share(config), _by_width(heads), _by_width(weights))


def _by_width(weights: list[StoredWeight]) -> Mapping[str, int]:
    counts: Counter[str] = Counter()
    for weight in weights:
        bits = 8 * weight.device_bytes / weight.device_elements
        counts[next(name for least, name in _WIDTHS if bits >= least)] += weight.device_elements
    return counts
