"""The tier of other engines' memory: what is kept for them, and what is fetched from them."""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Sequence
from typing import Any

from jaxis.config.kv_transfer import KVTransferConfig
from jaxis.engine.kv_store.block_layout import StoredBlockLayout
from jaxis.engine.kv_store.host_tier import BlockKey
from jaxis.engine.kv_store.peer_client import PeerClient
from jaxis.engine.kv_store.peer_server import PeerServer
from jaxis.engine.kv_store.stats import TierStats
from jaxis.engine.kv_store.store import KVStore


class Peers:
    """An engine's part in prefill and decode on different machines.

    Attributes:
      client: Fetches blocks from producers; None: this engine only is one.

    Args:
      config: Which part it has.
      store: Its blocks.
      namespace: What their bytes depend on, besides their tokens.
      layout: How they are exchanged.

    Raises:
      ConfigError: The token cannot be read, or the address cannot be listened on.
    """

    def __init__(self, config: KVTransferConfig, store: KVStore, namespace: str, layout: StoredBlockLayout) -> None:
        token = config.read_token()
        self._config, self._store = config, store
        self._stats = TierStats()
        self._engine_id = config.engine_id or uuid.uuid4().hex
        self._server = self.client = None
        if config.is_consumer:
            self.client = PeerClient(namespace, layout, token, self._stats)
        if config.is_producer:
            self._server = PeerServer(store, namespace, layout, config.kv_ip, config.kv_port, token, self._stats)

    @property
    def stats(self) -> TierStats:
        """What was sent and fetched so far."""
        return dataclasses.replace(self._stats)

    @property
    def hands_over(self) -> bool:
        """Whether this engine computes prompts for others."""
        return self._server is not None

    def hand_over(self, keys: Sequence[BlockKey], transfer_id: str | None) -> dict[str, Any] | None:
        """Keeps a prompt's blocks, which are in the store or on their way, for another engine.

        Args:
          keys: Of the blocks.
          transfer_id: See `KVStore.promise`.

        Returns:
          The `kv_transfer_params` with which that finds them; None if they cannot be kept.
        """
        if self._server is None or not keys or not self._store.promise(keys, transfer_id):
            return None
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": self._engine_id,
            "remote_host": self._config.kv_ip,
            "remote_port": self._server.port,
        }

    def close(self) -> None:
        """Hands out no more blocks."""
        if self._server is not None:
            self._server.close()
