"""The events of an engine's prefix caches, one stream for each data rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from jaxis.config.attention_span import AttentionSpan
from jaxis.config.kv_events import KVEventsConfig
from jaxis.engine.scheduling.cache_events import CacheEventRecorder
from jaxis.host.extras import check_extra

if TYPE_CHECKING:
    from jaxis.engine.kv_events.publisher import EventPublisher


class CacheEventStreams:
    """Records what happens in the prefix cache of each data rank, and publishes it.

    Attributes:
      recorders: One for each rank; None: nothing is recorded.

    Args:
      config: Where events are published; None: nowhere.
      spans: How the layers of each group of blocks attend.
      block_size: Tokens of a block.
      num_ranks: Number of data ranks.

    Raises:
      ConfigError: An address cannot be used, or what publishes is not installed.
    """

    def __init__(
        self, config: KVEventsConfig | None, spans: Sequence[AttentionSpan], block_size: int, num_ranks: int
    ) -> None:
        self.recorders: list[CacheEventRecorder | None] = [None] * num_ranks
        self._streams: list[tuple[CacheEventRecorder, EventPublisher]] = []
        if config is not None:
            check_extra("kv-events", "kv_events_config")
            from jaxis.engine.kv_events.publisher import open_publishers

            publishers = open_publishers(config, spans, block_size, num_ranks)
            self._streams = [(CacheEventRecorder(len(spans)), publisher) for publisher in publishers]
            self.recorders = [recorder for recorder, _ in self._streams]

    def publish(self) -> None:
        """Publishes what was recorded since the last time."""
        for recorder, publisher in self._streams:
            publisher.publish(recorder.take())

    def clear(self) -> None:
        """Publishes that the caches are empty."""
        for recorder, _ in self._streams:
            recorder.clear()
        self.publish()

    def close(self) -> None:
        """Ends publishing."""
        for _, publisher in self._streams:
            publisher.close()
