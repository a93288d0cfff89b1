"""vLLM's format of KV cache events: MessagePack, a batch as an array, and each event in it as a map with a `type`.

Since version 0.23 vLLM writes events as maps (https://github.com/vllm-project/vllm/pull/42892); before, as arrays.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

import msgspec

from jaxis.config.attention_span import AttentionSpan
from jaxis.engine.kv_events.recorder import BlocksRemoved, BlocksStored, CacheEvent
from jaxis.host.channel import encode

# vLLM's name of a device's memory, whatever the device is.
MEDIUM = "GPU"


class BlockStored(msgspec.Struct, tag=True, omit_defaults=True):
    """Consecutive blocks were stored. The fields are vLLM's.

    Attributes:
      block_hashes: Hashes of the blocks.
      parent_block_hash: Hash of the block before them; None if they begin a sequence.
      token_ids: Tokens of the blocks.
      block_size: Tokens of a block.
      lora_id, lora_name: None; adapters are not reported.
      medium: Kind of memory that holds the blocks.
      extra_keys: Further data that each block's hash depends on: the salt, for the first block of a sequence.
      group_idx: Index of the blocks' group of layers.
      kv_cache_spec_kind: Kind of attention of these layers.
      kv_cache_spec_sliding_window: Window of that attention in tokens; None is all.
    """

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str
    lora_name: str | None
    extra_keys: list[list[str] | None]
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class BlockRemoved(msgspec.Struct, tag=True, omit_defaults=True):
    block_hashes: list[int]
    medium: str
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, tag=True):
    """The prefix cache was emptied."""


class EventBatch(msgspec.Struct, array_like=True):
    """The events of a step.

    Attributes:
      ts: Seconds since 1970.
      events: Events in their order.
      data_parallel_rank: Data rank of the blocks.
    """

    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int = 0


class EventEncoder:
    """Encodes batches.

    Args:
      spans: Attention spans of the layers of each group.
      block_size: Tokens of a block.
      rank: Data rank of the blocks.
    """

    def __init__(self, spans: Sequence[AttentionSpan], block_size: int, rank: int = 0) -> None:
        self._spans = tuple(spans)
        self._block_size, self._rank = block_size, rank

    def encode(self, events: Iterable[CacheEvent]) -> bytes:
        """Encodes a batch with the current time."""
        return encode(EventBatch(time.time(), [self._event(event) for event in events], self._rank))

    def _event(self, event: CacheEvent) -> BlockStored | BlockRemoved | AllBlocksCleared:
        if isinstance(event, BlocksStored):
            span = self._spans[event.group]
            first = [event.cache_salt] if event.cache_salt is not None and event.parent is None else None
            return BlockStored(
                block_hashes=[block_hash(digest) for digest in event.digests],
                parent_block_hash=None if event.parent is None else block_hash(event.parent),
                token_ids=event.token_ids,
                block_size=self._block_size,
                lora_id=None,
                medium=MEDIUM,
                lora_name=None,
                extra_keys=[first, *[None] * (len(event.digests) - 1)],
                group_idx=event.group,
                kv_cache_spec_kind=_kind(span),
                kv_cache_spec_sliding_window=span.sliding_window,
            )
        if isinstance(event, BlocksRemoved):
            return BlockRemoved([block_hash(digest) for digest in event.digests], MEDIUM, event.group)
        return AllBlocksCleared()


def block_hash(digest: bytes) -> int:
    """Returns the last 64 bits of a block's digest: the only form that every reader accepts, and vLLM's default."""
    return int.from_bytes(digest[-8:], "big")


def _kind(span: AttentionSpan) -> str:
    if span.attention_chunk_size is not None:
        return "chunked_local_attention"
    return "full_attention" if span.sliding_window is None else "sliding_window"
