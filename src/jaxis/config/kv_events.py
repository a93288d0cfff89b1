"""Configuration of the events that an engine publishes about its prefix cache, under vLLM's names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from jaxis.config.argument_keys import check_keys
from jaxis.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class KVEventsConfig:
    """The argument `kv_events_config`; names, defaults and meaning are those of vLLM.

    Attributes:
      publisher: "zmq" or "null"; None is "zmq" if `enable_kv_cache_events`.
      endpoint: Address of the events; of several data ranks, the first one's (see `of_rank`). An address with `*` or
        `::`, `ipc://` or `inproc://` is bound; any other one is connected to.
      replay_endpoint: Address for requests of missed batches, which is bound; None: no replay.
      topic: First frame of each message.
      buffer_steps: Number of batches kept for `replay_endpoint`.
      hwm: Maximum number of batches waiting for a slow reader; it loses later ones.
      max_queue_size: Maximum number of batches waiting to be sent; none ever waits, so any limit holds.
    """

    enable_kv_cache_events: bool = False
    publisher: str | None = None
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    topic: str = ""
    buffer_steps: int = 10_000
    hwm: int = 100_000
    max_queue_size: int = 100_000

    @classmethod
    def of(cls, given: Mapping[str, Any] | None) -> KVEventsConfig | None:
        """Returns the configuration of these values; None if they publish nothing.

        Raises ConfigError if a name or a value is not supported.
        """
        if given is None:
            return None
        types = {field.name: type(field.default) for field in fields(cls)}
        check_keys("kv_events_config", given, types)
        for name, value in given.items():
            kind = str if types[name] is type(None) else types[name]
            if not (type(value) is kind or (value is None and types[name] is type(None))):
                raise ConfigError(f"kv_events_config: {name}={value!r} must be of type {kind.__name__}")
        config = cls(**given)
        if config.publisher not in (None, "null", "zmq"):
            raise ConfigError(f"kv_events_config: publisher={config.publisher!r} must be zmq or null")
        if min(config.buffer_steps, config.hwm, config.max_queue_size) < 1:
            raise ConfigError("kv_events_config: buffer_steps, hwm and max_queue_size must be at least 1")
        return config if config.enable_kv_cache_events and config.publisher != "null" else None

    def of_rank(self, rank: int) -> KVEventsConfig:
        """Returns the configuration of a data rank's own publisher, with vLLM's addresses."""
        replay = None if self.replay_endpoint is None else _of_rank(self.replay_endpoint, rank)
        return replace(self, endpoint=_of_rank(self.endpoint, rank), replay_endpoint=replay)


def _of_rank(endpoint: str, rank: int) -> str:
    """Adds the rank to a TCP port, unless it is any free one; other addresses get the rank at their end."""
    if rank == 0:
        return endpoint
    if not endpoint.startswith("tcp://"):
        return f"{endpoint}_dp{rank}"
    host, _, port = endpoint.rpartition(":")
    return f"{host}:{int(port) + rank}" if port.isdecimal() and int(port) else endpoint
