"""The tier of other engines: a server that hands out blocks of the store, and a client that fetches blocks."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import socket
import ssl
import threading
import time
import uuid
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxis.config.kv_transfer import KVTransferConfig
from jaxis.engine.kv_connector import TierStats
from jaxis.engine.kv_store.block_layout import StoredBlockLayout
from jaxis.engine.kv_store.host_tier import BlockKey
from jaxis.engine.kv_store.peer_client import PeerClient
from jaxis.engine.kv_store.peer_protocol import (
    MAX_ASK_BYTES,
    MAX_COMING_SECONDS,
    Ask,
    Block,
    Coming,
    Have,
    PeerChannel,
    PeerError,
    Ready,
    Want,
    pack_known,
    split_digests,
    unpack_places,
)
from jaxis.engine.kv_store.store import KVStore
from jaxis.errors import ConfigError
from jaxis.host.threads import Deadline

# Time after which a connection without a question is closed.
ASK_SECONDS = 5.0
# Longest wait for the request whose `transfer_id` another engine asks for.
TRANSFER_SECONDS = 5.0
# Interval of the messages that a block is still being computed.
COMING_SECONDS = 1.0
CONVERSATION_SECONDS = 60.0
MAX_CONVERSATIONS = 64
_logger = logging.getLogger(__name__)


class PeerServer:
    """Hands out blocks to other engines. It listens in one thread, and answers each engine in another.

    Attributes:
      port: Port on which it listens.

    Args:
      store: Store of the blocks.
      namespace: Digest of all that the bytes of blocks depend on, besides their tokens.
      layout: Converter to the layout of exchanged blocks.
      host: Address to listen on.
      port: Port to listen on; 0 is any free one.
      tls: TLS settings of connections; None: without TLS.
      stats: Counters. Blocks that are sent count as saved, and failed conversations as failed blocks.

    Raises:
      ConfigError: The address cannot be listened on.
    """

    def __init__(
        self,
        store: KVStore,
        namespace: str,
        layout: StoredBlockLayout,
        host: str,
        port: int,
        tls: ssl.SSLContext | None,
        stats: TierStats,
    ) -> None:
        self._store, self._namespace, self._layout = store, namespace, layout
        self._tls, self._stats = tls, stats
        self._places = threading.BoundedSemaphore(MAX_CONVERSATIONS)
        self._lock = threading.Lock()
        try:
            address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            self._listener = socket.create_server(address[4][:2], family=address[0])
        except OSError as error:
            raise ConfigError(
                f"kv_transfer_config: kv_ip={host!r} with kv_port={port} cannot be listened on ({error.strerror}): "
                "give an address of this machine, and a free port"
            ) from None
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._listen, name="jaxis-kv-peers", daemon=True).start()

    def close(self) -> None:
        """Accepts no more connections; open ones go on to their end."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes up the thread
        self._listener.close()

    def _listen(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                if self._listener.fileno() < 0:
                    return
                time.sleep(0.1)  # no more files may be open, say
                continue
            if not self._places.acquire(blocking=False):
                connection.close()
                continue
            threading.Thread(target=self._answer, args=(connection,), name="jaxis-kv-peer", daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        try:
            with connection, self._secured(connection) as secured:
                deadline = Deadline(CONVERSATION_SECONDS)
                self._converse(PeerChannel(secured, MAX_ASK_BYTES, deadline), deadline)
        except (PeerError, ValueError, OSError) as error:
            with self._lock:
                self._stats.failed_blocks += 1
            _logger.info("another engine got no blocks, or not all: %s", error)
        finally:
            self._places.release()

    def _secured(self, connection: socket.socket) -> socket.socket:
        if self._tls is None:
            return connection
        connection.settimeout(ASK_SECONDS)
        secured = self._tls.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
        # The socket's timeout is for each receive: a client that sends single bytes would outlast it.
        closing = threading.Timer(ASK_SECONDS, _cut, (secured,))
        closing.start()
        try:
            secured.do_handshake()
        finally:
            closing.cancel()
        return secured

    def _converse(self, peer: PeerChannel, deadline: Deadline) -> None:
        peer.send(Ready(self._namespace))
        ask = peer.receive(Ask, ASK_SECONDS)
        digests, groups = split_digests(ask.digests), range(len(self._store.block_bytes))
        try:
            if ask.transfer_id:
                self._store.wait_for_transfer(ask.transfer_id, TRANSFER_SECONDS)
            known = np.array([[self._has(group, digest) for digest in digests] for group in groups], bool)
            peer.send(Have(pack_known(known)))
            want = peer.receive(Want, ASK_SECONDS)
            for group, index in unpack_places(want.places, len(groups), len(digests)):
                key = (group, digests[index])
                self._wait_for(peer, deadline, key)
                self._send(peer, key, index)
        finally:
            # The other engine computes the blocks that it has not received, if any.
            keys = [(group, digest) for digest in digests for group in groups]
            self._store.release(keys, ask.transfer_id or None)

    def _has(self, group: int, digest: bytes) -> bool:
        return self._store.has(group, digest) or self._store.is_coming((group, digest))

    def _wait_for(self, peer: PeerChannel, deadline: Deadline, key: BlockKey) -> None:
        until = Deadline(MAX_COMING_SECONDS)
        while self._store.wait_for(key, COMING_SECONDS) and until.left:
            deadline.put_off(CONVERSATION_SECONDS)
            peer.send(Coming())

    def _send(self, peer: PeerChannel, key: BlockKey, index: int) -> None:
        block = self._store.read_promised(key)
        data = None if block is None else self._layout.to_shared(key[0], block).tobytes()
        if data is not None:
            with self._lock:
                self._stats.saved_blocks += 1
                self._stats.saved_bytes += len(data)
        peer.send(Block(key[0], index, data))


def _cut(connection: socket.socket) -> None:
    """Ends a connection that another thread reads from, without TLS's closing handshake."""
    with contextlib.suppress(OSError):  # it has just ended
        socket.socket.shutdown(connection, socket.SHUT_RDWR)


class Peers:
    """An engine's part in prefill and decode on different machines.

    Attributes:
      client: Client that fetches blocks from producers; None if this engine only produces.

    Args:
      config: Configuration of its role and address.
      store: Store of its blocks.
      namespace: Digest of all that the bytes of blocks depend on, besides their tokens.
      layout: Converter to the layout of exchanged blocks.

    Raises:
      ConfigError: A certificate cannot be used, or the address cannot be listened on.
    """

    def __init__(self, config: KVTransferConfig, store: KVStore, namespace: str, layout: StoredBlockLayout) -> None:
        self._config, self._store = config, store
        self._stats = TierStats()
        self._engine_id = config.engine_id or uuid.uuid4().hex
        self._server = self.client = None
        if config.is_consumer:
            self.client = PeerClient(namespace, layout, config.ssl_context(is_server=False), self._stats)
        if config.is_producer:
            tls = config.ssl_context(is_server=True)
            self._server = PeerServer(store, namespace, layout, config.kv_ip, config.kv_port, tls, self._stats)

    @property
    def stats(self) -> TierStats:
        """Counters of sent and fetched blocks, as a copy."""
        return dataclasses.replace(self._stats)

    @property
    def hands_over(self) -> bool:
        """True if this engine computes prompts for others."""
        return self._server is not None

    def hand_over(self, keys: Sequence[BlockKey], transfer_id: str | None) -> dict[str, Any] | None:
        """Keeps a prompt's blocks, which are in the store or on their way, for another engine.

        Args:
          keys: Keys of the blocks.
          transfer_id: Id of the transfer, as in `KVStore.promise`.

        Returns:
          The `kv_transfer_params` with which the other engine finds the blocks; None if they cannot be kept.
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
        """Stops handing out blocks."""
        if self._server is not None:
            self._server.close()
