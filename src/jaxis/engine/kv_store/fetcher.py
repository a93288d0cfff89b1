"""Fetching of a prompt's blocks from disk or other engines into memory, before the prompt is scheduled."""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Sequence
from concurrent import futures
from typing import TYPE_CHECKING

import numpy as np

from jaxis.engine.kv_connector import FETCH_SECONDS
from jaxis.engine.kv_store.host_tier import BlockKey
from jaxis.engine.kv_store.store import KVStore
from jaxis.engine.scheduling.block_digests import extend_digests
from jaxis.engine.scheduling.block_manager import BlockManager
from jaxis.engine.scheduling.data_ranks import DataRanksBlocks
from jaxis.host.threads import Deadline, run_in_daemon
from jaxis.kv_transfer_params import KVTransferParams

if TYPE_CHECKING:
    from jaxis.engine.kv_store.peer_client import PeerClient

# Most prompts at a time; most of them wait for another engine that still computes their prompt.
MAX_FETCHES = 32
_TURN_SECONDS = 0.25
_logger = logging.getLogger(__name__)


class BlockFetcher:
    """Fetches the blocks of a few prompts at a time; safe for several threads.

    Args:
      store: Store of the blocks.
      client: Client of other engines; None: these are not asked.
      seconds: Longest wait of a prompt.
    """

    def __init__(self, store: KVStore, client: PeerClient | None = None, seconds: float = FETCH_SECONDS) -> None:
        self._store, self._client = store, client
        self._seconds = seconds
        self._places = threading.BoundedSemaphore(MAX_FETCHES)

    def fetch(
        self,
        blocks: BlockManager | DataRanksBlocks,
        prompt_token_ids: Sequence[int],
        cache_salt: str | None,
        source: KVTransferParams | None = None,
        deadline: Deadline | None = None,
    ) -> None:
        """Fetches the available blocks of a prompt into memory. Returns when they are there, or at the deadline.

        Args:
          blocks: Block manager, which knows the blocks that need no fetching.
          prompt_token_ids: The prompt, which may be unchecked.
          cache_salt: Salt of the prompt.
          source: Name of another engine that has computed the prompt, or computes it; None: there is none.
          deadline: End of the wait, which a caller that no longer wants the blocks moves to now. None is `seconds` from
            now.
        """
        deadline = deadline or Deadline(self._seconds)
        if not self._places.acquire(timeout=deadline.left):
            return
        # A disk or a DNS server may never answer: a separate thread waits for it, and gives its place back only then.
        work = functools.partial(self._fetch, blocks, list(prompt_token_ids), cache_salt, source, deadline)
        done = run_in_daemon(work, "jaxis-kv-fetch")
        done.add_done_callback(lambda _: self._places.release())
        try:
            while not futures.wait([done], min(deadline.left, _TURN_SECONDS)).done:
                if not deadline.left:
                    _logger.info("a prompt did not wait any longer for its blocks on disk or elsewhere")
                    return
            done.result()
        except Exception:
            _logger.warning("blocks on disk or elsewhere could not be looked for", exc_info=True)
        finally:
            deadline.end()

    def _fetch(
        self,
        blocks: BlockManager | DataRanksBlocks,
        token_ids: list[int],
        cache_salt: str | None,
        source: KVTransferParams | None,
        deadline: Deadline,
    ) -> None:
        digests: list[bytes] = []
        num_blocks = min((len(token_ids) - 1) // blocks.block_size, self._store.max_host_blocks)
        extend_digests(
            digests,
            num_blocks,
            lambda start, stop: token_ids[start:stop],
            blocks.block_size,
            cache_salt,
            weights=blocks.weights,
        )

        if self._store.has_disk:
            self._read(blocks, digests, deadline)
        if self._client is not None and source is not None and deadline.left:
            self._ask(self._client, source, blocks, digests, deadline)

    def _read(self, blocks: BlockManager | DataRanksBlocks, digests: list[bytes], deadline: Deadline) -> None:
        """Reads from disk the longest prefix that disk and memory have together."""

        def is_anywhere(group: int, digest: bytes) -> bool:
            return blocks.is_known(group, digest) or self._store.on_disk((group, digest))

        longest, _ = blocks.search.longest(digests, is_anywhere)
        places = sorted(blocks.search.blocks_of(longest), key=lambda place: place[1])
        prefix = [(group, digests[index]) for group, index in places]
        self._store.fetch([key for key in prefix if not blocks.is_known(*key)], deadline)
        self._store.note_used(prefix)

    def _ask(
        self,
        client: PeerClient,
        source: KVTransferParams,
        blocks: BlockManager | DataRanksBlocks,
        digests: list[bytes],
        deadline: Deadline,
    ) -> None:
        """Fetches from another engine the blocks that, with those of this one, make the longest prefix."""
        known_here, _ = blocks.search.longest(digests, blocks.is_known)
        if known_here == len(digests) or source.peer is None:
            return
        arrived: list[BlockKey] = []
        epoch, index_of = self._store.epoch, {digest: index for index, digest in enumerate(digests)}

        def choose(known_there: np.ndarray) -> list[tuple[int, int]]:
            def is_known(group: int, digest: bytes) -> bool:
                index = index_of[digest]
                is_there = index < known_there.shape[1] and known_there[group, index]
                return bool(is_there) or blocks.is_known(group, digest)

            longest, _ = blocks.search.longest(digests, is_known)
            client.note_missed(len(digests) - longest)
            if longest <= known_here:
                return []
            # In the order in which they are computed.
            places = sorted(blocks.search.blocks_of(longest), key=lambda place: place[1])
            return [(group, index) for group, index in places if not blocks.is_known(group, digests[index])]

        def put(key: BlockKey, block: np.ndarray) -> bool:
            if not deadline.left or not self._store.put_fetched(key, block, epoch):
                return False
            arrived.append(key)
            return True

        client.fetch(source.peer, digests, choose, put, deadline, source.transfer_id)
        if not deadline.left:  # the request has stopped waiting for them
            self._store.release(arrived)
