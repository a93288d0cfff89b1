"""Construction of an engine's KV connector from the rooms that have one."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING

from jaxis.engine.execution.programs import Programs
from jaxis.engine.fingerprint import blocks_fingerprint
from jaxis.engine.kv_connector import KVConnector
from jaxis.rooms import has_room, room_module

if TYPE_CHECKING:
    from jaxis.config import VllmConfig
    from jaxis.engine.arguments import EngineArgs

# Rooms whose `make_connector` wraps the connector of those before. `EngineArgs` refuses arguments of rooms that lack.
_ROOMS = ("engine.kv_events", "engine.kv_store")


def make_connector(
    args: EngineArgs, programs: Programs, config: VllmConfig, path: Path, fingerprint: str
) -> KVConnector:
    """Returns the connector of the features that the arguments ask for; takes the result of `engine_fingerprint`.

    Raises:
      ConfigError: There is not enough memory for a store, its folder or an address cannot be used, or an extra is
        missing.
    """
    connector = KVConnector()
    of_blocks = functools.partial(blocks_fingerprint, path, args, config.model_config.max_model_len)
    for room in filter(has_room, _ROOMS):
        make = room_module(room, "make", "the engine").make_connector
        connector = make(args, programs, config.cache_config.block_size, fingerprint, of_blocks, connector)
    return connector
