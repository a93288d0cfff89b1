"""Speed of a training: tokens per second, and the share that it has of the products that the devices could compute."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxis.config.expert_counts import experts_per_token
from jaxis.host.machine import peak_memory_bytes
from jaxis.kernels.platform import target_platform
from jaxis.layers.embed import JaxLmHead
from jaxis.layers.experts import JaxExperts
from jaxis.layers.linear import JaxLinear
from jaxis.layers.module import named_modules
from jaxis.models.common.interfaces import DRAFT_PREFIX
from jaxis.training.base_model import BaseModel
from jaxis.training.config.training import TrainingParams

_LEAST_SECONDS, _NUM_PRODUCTS = 0.01, 5


@dataclass(frozen=True)
class TrainingCost:
    """Operations of a step's products with weights, two for each multiplication and addition.

    The derivatives of a product are two more, or one beside a frozen weight. Recomputation does not count, nor does
    attention.

    Attributes:
      of_token: Operations of the layers for a token.
      of_target: Operations of the head for a learned token.
    """

    of_token: float
    of_target: float


def step_cost(params: TrainingParams, base: BaseModel, trained: Mapping[str, jax.Array]) -> TrainingCost:
    """Counts the operations of training a model."""
    text_config = base.hf_config.get_text_config()
    layers, head = 0, 0
    for name, module in named_modules(base.construct(base.compute_dtype)):
        if name.startswith(DRAFT_PREFIX):
            continue
        if isinstance(module, JaxLmHead):
            head = module.input_size * module.output_size
        elif isinstance(module, JaxLinear):
            layers += module.input_size * module.output_size
        elif isinstance(module, JaxExperts):
            size = module.hidden_size * module.intermediate_size
            layers += len(module.stack_names) * size * experts_per_token(text_config)
    head = head or text_config.get("vocab_size", 0) * text_config.get("hidden_size", 0)  # tied to the embeddings
    passes = (2 if params.use_peft else 3) + params.has_reference
    adapters = 6 * sum(value.size for value in trained.values()) if params.use_peft else 0
    return TrainingCost(2 * passes * layers + adapters, 2 * passes * head)


def product_rate(dtype: DTypeLike, num_devices: int) -> float:
    """Measures the operations per second of a large product in JAX, on so many devices together."""
    product, size, seconds = jax.jit(jnp.matmul), 512, 0.0
    while seconds < _LEAST_SECONDS:
        size *= 2
        matrix = jnp.ones((size, size), dtype)
        product(matrix, matrix).block_until_ready()
        times = []
        for _ in range(_NUM_PRODUCTS):
            start = time.perf_counter()
            product(matrix, matrix).block_until_ready()
            times.append(time.perf_counter() - start)
        seconds = min(times)
    # Several devices on a CPU share its cores.
    return 2 * size**3 / seconds * (1 if target_platform() == "cpu" else num_devices)


def peak_bytes() -> int:
    """Returns the most memory that a device had in use; on CPU, that this process had."""
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    return max((each.get("peak_bytes_in_use", 0) for each in stats), default=0) or peak_memory_bytes()


class Speedometer:
    """Measures steps.

    Args:
      cost: Operations of the training.
      limit: Operations per second that the devices could compute.
    """

    def __init__(self, cost: TrainingCost, limit: float) -> None:
        self._cost, self._limit = cost, limit
        self._last = time.perf_counter()
        self.seconds = 0.0

    def measure(self, num_tokens: int, num_learned: int) -> dict[str, float]:
        """Counts a step; returns its values for metrics.jsonl."""
        now = time.perf_counter()
        self.seconds, self._last = now - self._last, now
        flops = num_tokens * self._cost.of_token + num_learned * self._cost.of_target
        return {
            "tokens_per_second": round(num_tokens / self.seconds, 1),
            "mfu": round(flops / self.seconds / self._limit, 4),
            "peak_memory_bytes": peak_bytes(),
        }


class StepProfiler:
    """Records traces of a run's steps by `jax.profiler`, as `training.profiler` says."""

    def __init__(self, params: TrainingParams) -> None:
        self._params = params.profiler
        self._folder = Path(params.profiler.save_dir or Path(params.output_dir) / "profiler")
        self._number = -1
        self._is_recording = False

    def before_step(self) -> None:
        """Begins or ends a trace, as the next step needs it."""
        self._number += 1
        self._record(self._params.is_on and self._params.schedule.records(self._number))

    def close(self) -> None:
        self._record(False)

    def _record(self, is_wanted: bool) -> None:
        if is_wanted and not self._is_recording:
            jax.profiler.start_trace(self._folder)
        elif self._is_recording and not is_wanted:
            jax.profiler.stop_trace()
        self._is_recording = is_wanted
