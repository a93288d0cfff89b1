"""vLLM's format of KV cache events: MessagePack, a batch as an array, and each event in it as a map with a `type`.

Since version 0.23 vLLM writes events as maps (https://github.com/vllm-project/vllm/pull/42892); before, as arrays.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

import msgspec

from jaxis.config.attention_span import AttentionSpan
from jaxis.engine.scheduling.cache_events import BlocksRemoved, BlocksStored, CacheEvent

# vLLM's word for the memory of the device, whatever the device is.
MEDIUM = "GPU"


class BlockStored(msgspec.Struct, tag=True, omit_defaults=True):
    """Consecutive blocks were stored; field by field as vLLM has it.

    Attributes:
      block_hashes: The blocks' names.
      parent_block_hash: The name of the block before them.
      token_ids: Their tokens.
      block_size: Tokens of a block.
      lora_id, lora_name: No adapter.
      medium: Where they are.
      extra_keys: For each block, what else its name depends on: the salt of a first block.
      group_idx: Which layers' blocks they are.
      kv_cache_spec_kind: How these layers attend.
      kv_cache_spec_sliding_window: Over how many tokens; None is all.
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
    """Blocks were removed."""

    block_hashes: list[int]
    medium: str
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, tag=True):
    """All blocks were removed."""


class EventBatch(msgspec.Struct, array_like=True):
    """The events of a step.

    Attributes:
      ts: Seconds since 1970.
      events: In their order.
      data_parallel_rank: Whose they are.
    """

    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int = 0


class EventEncoder:
    """Writes batches.

    Args:
      spans: How the layers of each group attend.
      block_size: Tokens of a block.
      rank: The data rank whose events they are.
    """

    def __init__(self, spans: Sequence[AttentionSpan], block_size: int, rank: int = 0) -> None:
        self._spans = tuple(spans)
        self._block_size, self._rank = block_size, rank
        self._encoder = msgspec.msgpack.Encoder()

    def encode(self, events: Iterable[CacheEvent]) -> bytes:
        """A batch that happens now."""
        return self._encoder.encode(EventBatch(time.time(), [self._event(event) for event in events], self._rank))

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
    """The last 64 bits of a block's digest, which is all that every reader takes; as vLLM does by default."""
    return int.from_bytes(digest[-8:], "big")


def _kind(span: AttentionSpan) -> str:
    if span.attention_chunk_size is not None:
        return "chunked_local_attention"
    return "full_attention" if span.sliding_window is None else "sliding_window"
