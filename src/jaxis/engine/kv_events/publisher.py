"""Sends batches of events to subscribers, and again to those that have missed some: ZeroMQ, as vLLM does.

A reader subscribes to a PUB socket: (topic, number, batch), the number in 8 bytes, big-endian, from 0. Where it finds a
gap, it asks the ROUTER socket for all batches from a number on, and gets (topic, number, batch) for each that is still
kept, and (nothing, -1, nothing) after the last. Before version 0.26, vLLM answered without the topic
(https://github.com/vllm-project/vllm/pull/45177).

vLLM's format of KV cache events: MessagePack, a batch as an array, and each event in it as a map with a `type`.

Since version 0.23 vLLM writes events as maps (https://github.com/vllm-project/vllm/pull/42892); before, as arrays.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence

import msgspec
import zmq

from jaxis.config.attention_span import AttentionSpan
from jaxis.config.kv_events import KVEventsConfig
from jaxis.engine.kv_connector import KVConnector
from jaxis.engine.kv_events.recorder import BlocksRemoved, BlocksStored, CacheEvent, CacheEventRecorder
from jaxis.engine.scheduling.data_ranks import DataRanksScheduler
from jaxis.engine.scheduling.scheduler import Scheduler
from jaxis.errors import ConfigError
from jaxis.host.channel import encode

# vLLM's word for the memory of the device, whatever the device is.
MEDIUM = "GPU"
NO_MORE = (-1).to_bytes(8, "big", signed=True)
_LINGER_MS = 500  # for what is not sent yet when the publisher is closed
_logger = logging.getLogger(__name__)


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

    def encode(self, events: Iterable[CacheEvent]) -> bytes:
        """A batch that happens now."""
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
    """The last 64 bits of a block's digest, which is all that every reader takes; as vLLM does by default."""
    return int.from_bytes(digest[-8:], "big")


def _kind(span: AttentionSpan) -> str:
    if span.attention_chunk_size is not None:
        return "chunked_local_attention"
    return "full_attention" if span.sliding_window is None else "sliding_window"


class EventPublisher:
    """Publishes events. Sending never waits: what a slow reader has no room for is lost to it, which it can see.

    Attributes:
      endpoint: Where events are published; of an address with a free port, the one that was found.
      replay_endpoint: The same for batches that were missed; None: nowhere.

    Args:
      config: Where, and how much is kept.
      spans: How the layers of each group attend.
      block_size: Tokens of a block.
      rank: The data rank whose blocks they are.

    Raises:
      ConfigError: An address cannot be used.
    """

    def __init__(self, config: KVEventsConfig, spans: Sequence[AttentionSpan], block_size: int, rank: int = 0) -> None:
        self._encoder = EventEncoder(spans, block_size, rank)
        self._context = zmq.Context()
        self._topic = config.topic.encode()
        self._numbers = itertools.count()
        self._kept: deque[tuple[bytes, bytes]] = deque(maxlen=config.buffer_steps)
        self._lock = threading.Lock()  # of `_kept`
        try:
            self._socket = self._open(zmq.PUB, config.endpoint, config.hwm)
            self.endpoint = self._socket.get_string(zmq.LAST_ENDPOINT).rstrip("\0")
            self.replay_endpoint = None
            if config.replay_endpoint is not None:
                replay = self._open(zmq.ROUTER, config.replay_endpoint, config.hwm, bind=True)
                self.replay_endpoint = replay.get_string(zmq.LAST_ENDPOINT).rstrip("\0")
                threading.Thread(target=self._replay, args=(replay,), name="jaxis-kv-replay", daemon=True).start()
        except BaseException:
            self._context.destroy(linger=0)
            raise

    def publish(self, events: Sequence[CacheEvent]) -> None:
        """Sends the events of a step as a batch, if there are any; one thread at a time may call this."""
        if not events:
            return
        batch = self._encoder.encode(events)
        number = next(self._numbers).to_bytes(8, "big")
        with self._lock:
            self._kept.append((number, batch))
        self._socket.send_multipart((self._topic, number, batch), zmq.DONTWAIT)

    def close(self) -> None:
        """Ends publishing; waits shortly for what is not sent yet."""
        if not self._socket.closed:
            self._socket.close(linger=_LINGER_MS)
            self._context.term()

    def _open(self, kind: int, endpoint: str, most_waiting: int, *, bind: bool = False) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.set_hwm(most_waiting)
        bind = bind or "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc://", "inproc://"))
        try:
            (socket.bind if bind else socket.connect)(endpoint)
        except zmq.ZMQError as error:
            action = "bound" if bind else "connected to"
            raise ConfigError(f"kv_events_config: {endpoint} cannot be {action}: {error.strerror}") from None
        return socket

    def _replay(self, socket: zmq.Socket[bytes]) -> None:
        """Answers requests, in a thread that has the socket to itself, until the context ends."""
        with socket:
            socket.linger = 0
            while True:
                try:
                    self._answer(socket, socket.recv_multipart())
                except zmq.ContextTerminated:
                    return
                except zmq.ZMQError as error:
                    _logger.warning("a reader of KV events has gone: %s", error)

    def _answer(self, socket: zmq.Socket[bytes], request: list[bytes]) -> None:
        if len(request) != 3 or len(request[2]) != 8:
            _logger.warning("a request for KV events is not a number of 8 bytes")
            return
        reader, _, first = request
        with self._lock:
            wanted = [kept for kept in self._kept if kept[0] >= first]
        for number, batch in wanted:
            socket.send_multipart((reader, b"", self._topic, number, batch))
        socket.send_multipart((reader, b"", b"", NO_MORE, b""))


class CacheEvents(KVConnector):
    """Publishes what happens in the prefix cache of each data rank, as a stream of its own.

    Args:
      config: Where.
      spans: How the layers of each group of blocks attend.
      block_size: Tokens of a block.
      num_ranks: Number of data ranks.

    Raises:
      ConfigError: An address cannot be used.
    """

    def __init__(self, config: KVEventsConfig, spans: Sequence[AttentionSpan], block_size: int, num_ranks: int) -> None:
        self._num_groups, self._block_size = len(spans), block_size
        self._recorders: list[CacheEventRecorder] = []
        self.publishers: list[EventPublisher] = []
        with contextlib.ExitStack() as opened:
            for rank in range(num_ranks):
                publisher = EventPublisher(config.of_rank(rank), spans, block_size, rank)
                opened.callback(publisher.close)
                self.publishers.append(publisher)
            opened.pop_all()

    def block_connectors(self, num_ranks: int) -> list[CacheEventRecorder]:
        """See `KVConnector`."""
        self._recorders = [CacheEventRecorder(self._num_groups, self._block_size) for _ in range(num_ranks)]
        return self._recorders

    def begin(self, scheduler: Scheduler | DataRanksScheduler) -> None:  # noqa: ARG002
        """Publishes that the caches are empty."""
        self.step_done()

    def step_done(self) -> None:
        """Publishes what was recorded since the last time."""
        for recorder, publisher in zip(self._recorders, self.publishers, strict=False):  # none after `close`
            publisher.publish(recorder.take())

    def close(self) -> None:
        """Publishes that the caches are empty, and ends."""
        for recorder in self._recorders:
            recorder.cleared()
        self.step_done()
        for publisher in self.publishers:
            publisher.close()
        self.publishers = []
