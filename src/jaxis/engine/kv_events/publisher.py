"""Publishes batches of cache events to subscribers, and resends those that they missed: ZeroMQ, as vLLM does.

A reader subscribes to a PUB socket and gets (topic, number, batch), the number in 8 bytes, big-endian, from 0. A reader
that finds a gap asks the ROUTER socket for all batches from a number on. It gets (topic, number, batch) for each batch
that is still kept, and (nothing, -1, nothing) after the last. Before version 0.26, vLLM answered without the topic
(https://github.com/vllm-project/vllm/pull/45177).
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
from collections import deque
from collections.abc import Sequence

import zmq

from jaxis.config.attention_span import AttentionSpan
from jaxis.config.kv_events import KVEventsConfig
from jaxis.engine.kv_connector import KVConnector
from jaxis.engine.kv_events.event_format import EventEncoder
from jaxis.engine.kv_events.recorder import CacheEvent, CacheEventRecorder
from jaxis.engine.scheduling.data_ranks import DataRanksScheduler
from jaxis.engine.scheduling.scheduler import Scheduler
from jaxis.errors import ConfigError

NO_MORE = (-1).to_bytes(8, "big", signed=True)
_LINGER_MS = 500  # longest wait of `close` for unsent batches
_logger = logging.getLogger(__name__)


class EventPublisher:
    """Publishes events. Sending never waits: a slow reader loses batches, which it can see by their numbers.

    Attributes:
      endpoint: Address where events are published; its port is the real one if a free port was asked for.
      replay_endpoint: Address for missed batches; None: there is none.

    Args:
      config: Addresses, and number of batches that are kept.
      spans: Attention spans of the layers of each group.
      block_size: Tokens of a block.
      rank: Data rank of the blocks.

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
        """Sends the events of a step as a batch, if there are any. Not safe for several threads."""
        if not events:
            return
        batch = self._encoder.encode(events)
        number = next(self._numbers).to_bytes(8, "big")
        with self._lock:
            self._kept.append((number, batch))
        self._socket.send_multipart((self._topic, number, batch), zmq.DONTWAIT)

    def close(self) -> None:
        """Ends publishing; waits up to half a second for unsent batches."""
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
        """Answers requests for missed batches until the context ends. The socket belongs to its thread."""
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
    """Publishes the events of the prefix cache of each data rank, each rank as a stream of its own.

    Args:
      config: Addresses, and number of batches that are kept.
      spans: Attention spans of the layers of each group of blocks.
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
        self._recorders = [CacheEventRecorder(self._num_groups, self._block_size) for _ in range(num_ranks)]
        return self._recorders

    def begin(self, scheduler: Scheduler | DataRanksScheduler) -> None:  # noqa: ARG002
        self.step_done()

    def step_done(self) -> None:
        """Publishes the events recorded since the last call."""
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
