"""An engine's KV cache blocks beyond its devices: what it saves, fetches, and hands to other engines."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from jaxis.engine.block_fetcher import BlockFetcher
from jaxis.engine.execution.block_transfer import BlockTransfer
from jaxis.engine.kv_store.host_tier import BlockKey
from jaxis.engine.kv_store.stats import TierStats
from jaxis.engine.kv_store.store import KVStore
from jaxis.engine.output_processor import Request
from jaxis.engine.scheduling.data_ranks import DataRanksScheduler
from jaxis.engine.scheduling.scheduler import Scheduler
from jaxis.engine.scheduling.scheduler_output import SchedulerOutput
from jaxis.host.deadline import Deadline
from jaxis.sampling_params import SamplingParams

if TYPE_CHECKING:
    from jaxis.engine.kv_store.peers import Peers

_logger = logging.getLogger(__name__)


class StoredBlocks:
    """The blocks in an engine's store, and the ways into it and out of it.

    Attributes:
      store: Has them.
      peers: Other engines that blocks go to or come from; None: there are none.

    Args:
      transfer: Copies blocks between the devices and the store.
      peers: See above.
    """

    def __init__(self, transfer: BlockTransfer, peers: Peers | None) -> None:
        self.store: KVStore = transfer.store
        self.peers = peers
        self._transfer = transfer
        self._expected: dict[str, list[BlockKey]] = {}
        client = None if peers is None else peers.client
        self._fetcher = BlockFetcher(self.store, client) if self.store.has_disk or client is not None else None

    @property
    def stats(self) -> dict[str, TierStats]:
        """What each tier has done, by its name. Other threads may ask."""
        stats = dict(self.store.stats)
        return stats if self.peers is None else stats | {"peer": self.peers.stats}

    def fetches(self, params: SamplingParams) -> bool:
        """Whether there is anything that `fetch` could fetch for a request."""
        if self._fetcher is None or params.prompt_logprobs is not None:
            return False
        return self.store.has_disk or (params.kv_transfer is not None and params.kv_transfer.peer is not None)

    def fetch(
        self,
        scheduler: Scheduler | DataRanksScheduler,
        prompt_token_ids: Sequence[int],
        cache_salt: str | None,
        params: SamplingParams,
        deadline: Deadline | None = None,
    ) -> None:
        """Fetches what disk or another engine has of a prompt that is about to be added; may take seconds.

        Other threads may call it while steps run, and end its deadline.
        """
        if self._fetcher is not None and self.fetches(params):
            self._fetcher.fetch(scheduler.block_manager, prompt_token_ids, cache_salt, params.kv_transfer, deadline)

    def begin(self, request: Request, scheduler: Scheduler | DataRanksScheduler) -> None:
        """Has a prompt's blocks saved as they are computed, if they are for another engine."""
        wants = request.params.kv_transfer
        if self.peers is None or not self.peers.hands_over or wants is None or not wants.do_remote_decode:
            return
        sequence = request.completions[0].sequence
        sequence.hands_over_prompt = True
        keys = scheduler.ranks[0].block_manager.prompt_keys(sequence)
        self._expected[request.request_id] = keys
        self.store.expect(keys, wants.transfer_id)

    def end(self, request: Request) -> None:
        """Nobody is to wait any longer for the blocks of a request's prompt that are not in the store."""
        if (keys := self._expected.pop(request.request_id, None)) is not None:
            self.store.end_expecting(keys)

    def take_in(
        self, output: SchedulerOutput, requests: Iterable[Request], scheduler: Scheduler | DataRanksScheduler
    ) -> None:
        """What was saved up to a step that was read can be found from now on.

        Args:
          output: What ran in the step.
          requests: That got tokens from it. The blocks of those that have ended, and that another engine is to decode,
            are kept for it.
          scheduler: The engine's.
        """
        self._transfer.commit(output)
        for request in requests:
            if request.finished or request.error is not None:
                if request.error is None and request.request_id in self._expected:
                    self._hand_over(request, scheduler)
                self.end(request)

    def finish_saves(self, scheduler: Scheduler | DataRanksScheduler) -> None:
        """Saves what was computed since the last step; to be called when no step is to follow for a while."""
        if not self.store.saves_registered and not self.store.is_awaited:
            return
        saves = []
        for rank in scheduler.ranks:
            if self.store.saves_registered:
                rank.block_manager.save_states()
            moves = rank.block_manager.take_moves()
            saves.append(() if moves is None else moves.saves)
        self._transfer.finish(saves)

    def close(self, scheduler: Scheduler | DataRanksScheduler) -> None:
        """Saves what is left, and waits until it is on disk, for a while; no step may follow."""
        if self.peers is not None:
            self.peers.close()
        try:
            self.finish_saves(scheduler)
        except Exception:
            _logger.warning("the last blocks of the KV cache were not saved", exc_info=True)
        self.store.close()

    def _hand_over(self, request: Request, scheduler: Scheduler | DataRanksScheduler) -> None:
        """Keeps the blocks of a prompt, which are in the store but for those that had no room, for another engine."""
        assert self.peers is not None
        sequence = request.completions[0].sequence
        ranks = [rank.block_manager for rank in scheduler.ranks]
        known = [(blocks.known_prompt(sequence), blocks) for blocks in ranks]
        keys, blocks = max(known, key=lambda of_rank: len(of_rank[0]))
        wants = request.params.kv_transfer
        transfer_id = None if wants is None else wants.transfer_id
        request.kv_transfer_params = self.peers.hand_over(keys, transfer_id)
        if request.kv_transfer_params is not None:
            blocks.save(keys)
