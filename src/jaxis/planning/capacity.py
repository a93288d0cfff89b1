"""The context, and the number of requests, that fit beside the weights of a device."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence

from jaxis.compilation.accelerators import Accelerator
from jaxis.config import VllmConfig
from jaxis.config.attention_span import AttentionSpan
from jaxis.engine.execution.cache_memory import ACCELERATOR_MEMORY_SHARE
from jaxis.engine.execution.kv_cache import longest_context, most_sequences, stage_share, widest_first
from jaxis.planning.device_model import DeviceModel


@dataclasses.dataclass(frozen=True)
class Capacity:
    """Room on each device.

    Attributes:
      cache_bytes: Bytes that weights leave to the cache, with several pipeline stages the average that each uses;
        negative if the weights do not fit.
      max_context: Tokens of the longest single request; 0 if none fits.
      max_requests: Requests of the asked-for length that fit at once.
    """

    cache_bytes: int
    max_context: int
    max_requests: int


def capacity(
    stages: Sequence[DeviceModel],
    vllm_config: VllmConfig,
    accelerator: Accelerator,
    context_len: int,
    place_bytes: int = 0,
) -> Capacity:
    """Computes the room that an engine has for requests that each grow to `context_len` tokens.

    There is one part of the model for each pipeline stage; `place_bytes` are each device's for adapters' places.
    """
    usable = int(accelerator.usable_bytes * ACCELERATOR_MEMORY_SHARE) - place_bytes
    least = usable - max(part.held_bytes for part in stages)
    if least <= 0:
        return Capacity(least, 0, 0)
    per_block, per_state = _of_all(stages)
    # Each stage has as many blocks, and so its own share of the memory of all; the first that has no more ends it.
    shares = [stage_share((part.bytes_per_block, part.state_bytes), (per_block, per_state)) for part in stages]
    left = min(int((usable - part.held_bytes) / (share or 1.0)) for part, share in zip(stages, shares, strict=True))
    on_average = left // len(stages)
    longest = longest_context(vllm_config, (per_block, per_state), left, vllm_config.model_config.max_model_len)
    if longest < context_len:
        return Capacity(on_average, longest, 0)
    return Capacity(on_average, longest, most_sequences(vllm_config, (per_block, per_state), left, context_len))


def _of_all(stages: Sequence[DeviceModel]) -> tuple[dict[AttentionSpan, int], int]:
    """Sums the bytes of a block in all layers of a span, the span that keeps most first, and of a request's states."""
    total: Counter[AttentionSpan] = Counter()
    for part in stages:
        total.update(part.bytes_per_block)
    return widest_first(total), sum(part.state_bytes for part in stages)
