"""The client side of the exchange of blocks between engines."""

from __future__ import annotations

import logging
import socket
import ssl
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence

import numpy as np

from jaxis.config.kv_transfer import is_loopback
from jaxis.engine.kv_connector import TierStats
from jaxis.engine.kv_store.block_layout import StoredBlockLayout
from jaxis.engine.kv_store.host_tier import BlockKey
from jaxis.engine.kv_store.peer_protocol import (
    DIGEST_BYTES,
    MAX_ASK_BYTES,
    OVERHEAD_BYTES,
    Ask,
    Block,
    Have,
    PeerChannel,
    PeerError,
    PeerTimeoutError,
    Ready,
    Want,
    pack_places,
    unpack_known,
)
from jaxis.host.threads import Deadline

CONNECT_SECONDS = 2.0
# Longest wait for a message; a producer that still computes the blocks sends one more often.
PATIENCE_SECONDS = 10.0
# Time for which an engine is not asked again after it could not be reached or did not answer.
AVOID_SECONDS = 5.0
MAX_AVOIDED = 256
_logger = logging.getLogger(__name__)

Place = tuple[int, int]
"""Group of a block, and index of its digest."""


class PeerClient:
    """Fetches the blocks of prompts from other engines. Several threads may use it at once.

    An error of another engine is never an error of a request: blocks that do not arrive are computed, and counted.

    Args:
      namespace: Digest of all that the bytes of blocks depend on, besides their tokens.
      layout: Converter to the layout of exchanged blocks.
      tls: TLS settings of connections; None: only engines on this machine are asked, without TLS.
      stats: Counters. Blocks that arrive count as loaded, blocks that the other engine does not have as missed, and
        blocks that do not arrive for another reason as failed.
    """

    def __init__(self, namespace: str, layout: StoredBlockLayout, tls: ssl.SSLContext | None, stats: TierStats) -> None:
        self._namespace, self._layout, self._tls = namespace, layout, tls
        self._stats = stats
        self._avoided: OrderedDict[tuple[str, int], float] = OrderedDict()
        self._reasons: set[str] = set()
        self._lock = threading.Lock()

    def fetch(
        self,
        address: tuple[str, int],
        digests: Sequence[bytes],
        choose: Callable[[np.ndarray], Sequence[Place]],
        put: Callable[[BlockKey, np.ndarray], bool],
        deadline: Deadline,
        transfer_id: str | None = None,
    ) -> None:
        """Fetches blocks of a prompt as far as they arrive, including blocks that are still being computed.

        Args:
          address: Host and port of the other engine.
          digests: Digests of the prompt's blocks.
          choose: Function that gets the other engine's blocks, bool [groups, digests], and returns the places to fetch,
            in order.
          put: Function that gets each block, uint8 [N], in memory of its own; it returns False to end the transfer.
          deadline: Time at which to give up. It is put off while the other engine computes the next block.
          transfer_id: Id of the transfer at the other engine, whose request may arrive there after this call; None if
            it came before.
        """
        wanted: list[Place] = []
        num_arrived = 0

        def take(key: BlockKey, block: np.ndarray) -> bool:
            nonlocal num_arrived
            num_arrived += 1
            with self._lock:
                self._stats.loaded_blocks += 1
                self._stats.loaded_bytes += block.nbytes
            return put(key, self._layout.from_shared(key[0], block))

        def choose_and_note(known: np.ndarray) -> Sequence[Place]:
            wanted.extend(choose(known))
            return wanted

        try:
            self._check(address)
            asked = digests[: MAX_ASK_BYTES // 2 // DIGEST_BYTES]
            self._fetch(address, asked, choose_and_note, take, deadline, transfer_id or "")
        except (PeerError, ValueError, OSError) as error:
            if deadline.is_cancelled:
                return
            reason = f"{address[0]}:{address[1]}: {error}"
            with self._lock:
                self._stats.failed_blocks += max(1, len(wanted) - num_arrived)
                # Logs each reason once: every request of a proxy may name the same engine that has ended.
                is_new = reason not in self._reasons and len(self._reasons) < MAX_AVOIDED
                if is_new:
                    self._reasons.add(reason)
            if is_new:
                _logger.warning("blocks of another engine did not arrive, and are computed: %s", reason)

    def note_missed(self, num_blocks: int) -> None:
        """Counts full blocks of a prompt that neither this engine nor the one that was asked has."""
        with self._lock:
            self._stats.missed_blocks += num_blocks

    def _check(self, address: tuple[str, int]) -> None:
        host, _ = address
        if self._tls is None and not is_loopback(host):
            raise PeerError("without ssl_certfile in kv_connector_extra_config, only engines on this machine are asked")
        if self._avoided.get(address, 0.0) > time.monotonic():
            raise PeerError(f"it did not answer in the last {AVOID_SECONDS:g} seconds")

    def _fetch(
        self,
        address: tuple[str, int],
        digests: Sequence[bytes],
        choose: Callable[[np.ndarray], Sequence[Place]],
        put: Callable[[BlockKey, np.ndarray], bool],
        deadline: Deadline,
        transfer_id: str,
    ) -> None:
        block_bytes = self._layout.shared_bytes
        num_groups = len(block_bytes)
        max_bytes = max(*block_bytes, num_groups * len(digests)) + OVERHEAD_BYTES
        with self._connect(address, deadline) as connection:
            peer = PeerChannel(connection, max_bytes, deadline, PATIENCE_SECONDS)
            try:
                ready = peer.receive(Ready, CONNECT_SECONDS)
            except PeerTimeoutError:
                if not deadline.is_cancelled:
                    self._avoid(address)
                raise
            if ready.namespace != self._namespace:
                raise PeerError("its model, version, machine or arguments differ")
            peer.send(Ask(b"".join(digests), transfer_id))
            places = choose(unpack_known(peer.receive(Have).known, num_groups, len(digests)))
            if not places:
                return
            peer.send(Want(pack_places(places)))
            for group, index in places:
                block = peer.receive(Block)
                if (block.group, block.index) != (group, index):
                    raise PeerError("another block than the next one")
                if block.data is None or len(block.data) != block_bytes[group]:
                    raise PeerError("a block is gone, or of another size")
                if not put((group, digests[index]), np.frombuffer(block.data, np.uint8)):
                    return

    def _connect(self, address: tuple[str, int], deadline: Deadline) -> socket.socket:
        seconds = min(CONNECT_SECONDS, deadline.left or CONNECT_SECONDS)
        try:
            connection = socket.create_connection(address, seconds)
            return connection if self._tls is None else self._tls.wrap_socket(connection)
        except OSError:
            if not deadline.is_cancelled:
                self._avoid(address)
            raise

    def _avoid(self, address: tuple[str, int]) -> None:
        with self._lock:
            self._avoided[address] = time.monotonic() + AVOID_SECONDS
            self._avoided.move_to_end(address)
            if len(self._avoided) > MAX_AVOIDED:
                self._avoided.popitem(last=False)
