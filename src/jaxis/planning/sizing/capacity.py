"""How much context, and how many requests, fit beside the weights of a device."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence

from jaxis.config import VllmConfig
from jaxis.config.attention_span import AttentionSpan
from jaxis.engine.execution.cache_memory import ACCELERATOR_MEMORY_SHARE
from jaxis.engine.execution.kv_cache import blocks_within, stage_share, widest_first
from jaxis.planning.accelerators import Accelerator
from jaxis.planning.sizing.device_model import DeviceModel


@dataclasses.dataclass(frozen=True)
class Capacity:
    """What fits on each device.

    Attributes:
      cache_bytes: Bytes that weights leave to the cache, of several pipeline stages what each uses of it, on average;
        negative if they do not fit.
      max_context: Tokens of the longest single request; 0 if none fits.
      max_requests: Requests of the asked-for length that fit at once.
    """

    cache_bytes: int
    max_context: int
    max_requests: int


def capacity(
    stages: Sequence[DeviceModel], vllm_config: VllmConfig, accelerator: Accelerator, context_len: int
) -> Capacity:
    """What the engine has room for.

    Args:
      stages: A device's part of the model, for each pipeline stage.
      vllm_config: Its sizes; `max_model_len` is the longest context that the model is for.
      accelerator: The devices.
      context_len: Tokens that each request grows to.
    """
    usable = int(accelerator.usable_bytes * ACCELERATOR_MEMORY_SHARE)
    least = usable - max(part.held_bytes for part in stages)
    if least <= 0:
        return Capacity(least, 0, 0)
    per_block, per_state = _of_all(stages)
    # Each stage has as many blocks, and so its own share of the memory of all; the first that has no more ends it.
    shares = [stage_share((part.bytes_per_block, part.state_bytes), (per_block, per_state)) for part in stages]
    left = min(int((usable - part.held_bytes) / (share or 1.0)) for part, share in zip(stages, shares, strict=True))
    block_size = stages[0].block_size

    def fits(num_requests: int, num_tokens: int) -> bool:
        """Whether an engine with these limits has the blocks, and states, for as many requests as long as that."""
        config = dataclasses.replace(
            vllm_config,
            model_config=dataclasses.replace(vllm_config.model_config, max_model_len=num_tokens),
            scheduler_config=dataclasses.replace(vllm_config.scheduler_config, max_num_seqs=num_requests),
        )
        memory = left - num_requests * per_state
        if memory < 0:
            return False
        blocks = blocks_within(config, per_block, memory, num_requests * num_tokens)
        step = config.scheduler_config.max_num_batched_tokens
        return all(
            span.max_held_blocks(num_requests, num_tokens, block_size, step) <= there_are
            for span, there_are in blocks.items()
        )

    on_average = left // len(stages)
    longest = _largest(lambda tokens: fits(1, tokens), vllm_config.model_config.max_model_len)
    if longest < context_len:
        return Capacity(on_average, longest, 0)
    most = left // min(per_block.values(), default=per_state)
    return Capacity(on_average, longest, _largest(lambda requests: fits(requests, context_len), most))


def _of_all(stages: Sequence[DeviceModel]) -> tuple[dict[AttentionSpan, int], int]:
    """Bytes of a block in all layers of a span, the span that keeps most first, and of a request's states."""
    total: Counter[AttentionSpan] = Counter()
    for part in stages:
        total.update(part.bytes_per_block)
    return widest_first(total), sum(part.state_bytes for part in stages)


def _largest(holds: Callable[[int], bool], most: int) -> int:
    """The largest number up to `most` for which it holds, if it holds for all smaller ones; 0 if for none."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if holds(middle) else (low, middle - 1)
    return low
