"""Hands out the blocks of a store to other engines."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time

import numpy as np

from jaxis.engine.kv_store.block_layout import StoredBlockLayout
from jaxis.engine.kv_store.host_tier import BlockKey
from jaxis.engine.kv_store.peer_protocol import (
    MAX_ASK_BYTES,
    MAX_COMING_SECONDS,
    Ask,
    Block,
    Challenge,
    Coming,
    Declined,
    Have,
    PeerConnection,
    PeerError,
    Seal,
    Want,
    block_parts,
    new_nonce,
    pack_known,
    split_digests,
    unpack_places,
)
from jaxis.engine.kv_store.stats import TierStats
from jaxis.engine.kv_store.store import KVStore
from jaxis.errors import ConfigError
from jaxis.host.deadline import Deadline

# Who has not said by then what it wants is nobody.
ASK_SECONDS = 5.0
# Until a request with the `transfer_id` that another engine asks for is added.
TRANSFER_SECONDS = 5.0
# While a block is being computed, the other engine is told so this often.
COMING_SECONDS = 1.0
CONVERSATION_SECONDS = 60.0
MAX_CONVERSATIONS = 64
_logger = logging.getLogger(__name__)


class PeerServer:
    """Listens in a thread, and answers each engine in a thread of its own.

    Attributes:
      port: Where it listens.

    Args:
      store: Has the blocks.
      namespace: What their bytes depend on, besides their tokens.
      layout: How blocks are exchanged.
      host: Where to listen.
      port: The same; 0 is any free one.
      token: What the others must know.
      stats: Counts what was sent as saved blocks, and conversations that went wrong as failed ones.

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
        token: bytes,
        stats: TierStats,
    ) -> None:
        self._store, self._namespace, self._layout = store, namespace, layout
        self._token, self._stats = token, stats
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
        """Takes no more connections; those that there are go on to their end."""
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
            with connection:
                deadline = Deadline(CONVERSATION_SECONDS)
                self._converse(PeerConnection(connection, MAX_ASK_BYTES, deadline), deadline)
        except (PeerError, ValueError, OSError) as error:
            with self._lock:
                self._stats.failed_blocks += 1
            _logger.info("another engine got no blocks, or not all: %s", error)
        finally:
            self._places.release()

    def _converse(self, peer: PeerConnection, deadline: Deadline) -> None:
        challenge = new_nonce()
        peer.send(Challenge(challenge))
        ask = peer.receive(Ask, ASK_SECONDS)
        seal = Seal(self._token, challenge, ask.nonce)
        seal.check(ask, *ask.parts())
        if ask.namespace != self._namespace:
            peer.send(Declined("its model, version, machine or arguments differ"))
            return
        digests, groups = split_digests(ask.digests), range(len(self._store.block_bytes))
        try:
            if ask.transfer_id:
                self._store.wait_for_transfer(ask.transfer_id, TRANSFER_SECONDS)
            known = np.array([[self._has(group, digest) for digest in digests] for group in groups], bool)
            data = pack_known(known)
            peer.send(Have(data, seal.checksum(Have, data)))
            want = peer.receive(Want, ASK_SECONDS)
            seal.check(want, want.places)
            for group, index in unpack_places(want.places, len(groups), len(digests)):
                key = (group, digests[index])
                self._wait_for(peer, deadline, key)
                self._send(peer, seal, key, index)
        finally:
            # Whether it got all or not: what it lacks now, it computes.
            keys = [(group, digest) for digest in digests for group in groups]
            self._store.release(keys, ask.transfer_id or None)

    def _has(self, group: int, digest: bytes) -> bool:
        return self._store.has(group, digest) or self._store.is_coming((group, digest))

    def _wait_for(self, peer: PeerConnection, deadline: Deadline, key: BlockKey) -> None:
        """Waits for a block as long as it is being computed."""
        until = Deadline(MAX_COMING_SECONDS)
        while self._store.wait_for(key, COMING_SECONDS) and until.left:
            deadline.put_off(CONVERSATION_SECONDS)
            peer.send(Coming())

    def _send(self, peer: PeerConnection, seal: Seal, key: BlockKey, index: int) -> None:
        block = self._store.read_promised(key)
        data = None if block is None else self._layout.to_shared(key[0], block).tobytes()
        if data is not None:
            with self._lock:
                self._stats.saved_blocks += 1
                self._stats.saved_bytes += len(data)
        peer.send(Block(key[0], index, data, seal.checksum(Block, *block_parts(key, data))))
