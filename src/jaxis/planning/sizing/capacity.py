"""How much context, and how many requests, fit beside the weights of a device."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from jaxis.config import VllmConfig
from jaxis.engine.execution.cache_memory import ACCELERATOR_MEMORY_SHARE
from jaxis.engine.execution.kv_cache import blocks_within
from jaxis.planning.accelerators import Accelerator
from jaxis.planning.sizing.device_model import DeviceModel


@dataclasses.dataclass(frozen=True)
class Capacity:
    """What fits on each device.

    Attributes:
      cache_bytes: Bytes that weights leave to the cache; negative if they do not fit.
      max_context: Tokens of the longest single request; 0 if none fits.
      max_requests: Requests of the asked-for length that fit at once.
    """

    cache_bytes: int
    max_context: int
    max_requests: int


def capacity(part: DeviceModel, vllm_config: VllmConfig, accelerator: Accelerator, context_len: int) -> Capacity:
    """What the engine has room for.

    Args:
      part: A device's part of the model.
      vllm_config: Its sizes; `max_model_len` is the longest context that the model is for.
      accelerator: The devices.
      context_len: Tokens that each request grows to.
    """
    left = int(accelerator.usable_bytes * ACCELERATOR_MEMORY_SHARE) - part.held_bytes

    def fits(num_requests: int, num_tokens: int) -> bool:
        """Whether an engine with these limits has the blocks, and states, for as many requests as long as that."""
        config = dataclasses.replace(
            vllm_config,
            model_config=dataclasses.replace(vllm_config.model_config, max_model_len=num_tokens),
            scheduler_config=dataclasses.replace(vllm_config.scheduler_config, max_num_seqs=num_requests),
        )
        memory = left - num_requests * part.state_bytes
        if memory < 0:
            return False
        blocks = blocks_within(config, part.bytes_per_block, memory, num_requests * num_tokens)
        step = config.scheduler_config.max_num_batched_tokens
        return all(
            span.max_held_blocks(num_requests, num_tokens, part.block_size, step) <= there_are
            for span, there_are in blocks.items()
        )

    if left <= 0:
        return Capacity(left, 0, 0)
    longest = _largest(lambda tokens: fits(1, tokens), vllm_config.model_config.max_model_len)
    if longest < context_len:
        return Capacity(left, longest, 0)
    most = left // min(part.bytes_per_block.values(), default=part.state_bytes)
    return Capacity(left, longest, _largest(lambda requests: fits(requests, context_len), most))


def _largest(holds: Callable[[int], bool], most: int) -> int:
    """The largest number up to `most` for which it holds, if it holds for all smaller ones; 0 if for none."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if holds(middle) else (low, middle - 1)
    return low
