"""Reads what is on disk of a prompt's blocks into memory, before the prompt is scheduled."""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Sequence

from jaxis.engine.kv_store.store import KVStore
from jaxis.engine.scheduling.block_digests import extend_digests
from jaxis.engine.scheduling.block_manager import BlockManager
from jaxis.engine.scheduling.data_ranks import DataRanksBlocks
from jaxis.host.daemon_thread import run_in_daemon

# What has not arrived by then is computed.
FETCH_SECONDS = 10.0
MAX_FETCHES = 4
_logger = logging.getLogger(__name__)


class BlockFetcher:
    """Fetches the blocks of a few prompts at a time; safe for several threads.

    Args:
      store: Of the blocks.
      seconds: How long a prompt waits for them, at most.
    """

    def __init__(self, store: KVStore, seconds: float = FETCH_SECONDS) -> None:
        self._store = store
        self._seconds = seconds
        self._places = threading.BoundedSemaphore(MAX_FETCHES)

    def fetch(
        self, blocks: BlockManager | DataRanksBlocks, prompt_token_ids: Sequence[int], cache_salt: str | None
    ) -> None:
        """Returns when what there is of a prompt's blocks is in memory, or after `seconds`.

        Args:
          blocks: Know what needs no fetching.
          prompt_token_ids: The prompt, which need not have been checked.
          cache_salt: Its salt.
        """
        deadline = time.monotonic() + self._seconds
        is_wanted = threading.Event()
        is_wanted.set()
        if not self._places.acquire(timeout=self._seconds):
            return
        # A disk may never answer: reading has a thread of its own, which keeps its place until it does.
        work = functools.partial(self._fetch, blocks, list(prompt_token_ids), cache_salt, is_wanted)
        done = run_in_daemon(work, "jaxis-kv-fetch")
        done.add_done_callback(lambda _: self._places.release())
        try:
            done.result(max(0.0, deadline - time.monotonic()))
        except TimeoutError:
            _logger.info("a prompt did not wait any longer for its blocks on disk")
        except Exception:
            _logger.warning("blocks on disk could not be looked for", exc_info=True)
        finally:
            is_wanted.clear()

    def _fetch(
        self,
        blocks: BlockManager | DataRanksBlocks,
        token_ids: list[int],
        cache_salt: str | None,
        is_wanted: threading.Event,
    ) -> None:
        digests: list[bytes] = []
        num_blocks = min((len(token_ids) - 1) // blocks.block_size, self._store.max_host_blocks)
        extend_digests(digests, num_blocks, lambda start, stop: token_ids[start:stop], blocks.block_size, cache_salt)

        def is_anywhere(group: int, digest: bytes) -> bool:
            return blocks.is_known(group, digest) or self._store.on_disk((group, digest))

        longest, _ = blocks.search.longest(digests, is_anywhere)
        places = sorted(blocks.search.blocks_of(longest), key=lambda place: place[1])
        prefix = [(group, digests[index]) for group, index in places]
        self._store.fetch([key for key in prefix if not blocks.is_known(*key)], is_wanted)
        self._store.note_used(prefix)
