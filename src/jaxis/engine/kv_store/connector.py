"""The KV connector of an engine with a store: saves blocks, fetches them, and hands them to other engines."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from jaxis.engine.execution.programs import Programs
from jaxis.engine.kv_connector import KVConnector, TierStats
from jaxis.engine.kv_store.block_transfer import BlockTransfer
from jaxis.engine.kv_store.fetcher import BlockFetcher
from jaxis.engine.kv_store.host_tier import BlockKey
from jaxis.engine.kv_store.store import KVStore
from jaxis.engine.scheduling.block_connector import (
    NO_CONNECTOR,
    NO_MOVES,
    BlockConnector,
    BlockMoves,
    LoadedBlock,
    SavedBlock,
)
from jaxis.engine.scheduling.block_manager import BlockManager
from jaxis.engine.scheduling.data_ranks import DataRanksScheduler
from jaxis.engine.scheduling.scheduler import Scheduler
from jaxis.engine.scheduling.scheduler_output import SchedulerOutput
from jaxis.engine.scheduling.sequence import Sequence as ScheduledSequence
from jaxis.host.threads import Deadline
from jaxis.sampling_params import SamplingParams

if TYPE_CHECKING:
    import numpy as np

    from jaxis.engine.kv_store.peers import Peers

_logger = logging.getLogger(__name__)


class BlockStore(Protocol):
    """The part of a store that `StoredBlocks` uses.

    Other threads may add and evict blocks at any time: a block that `has` reports may be gone when `find` looks for it.

    Attributes:
      saves_registered: True if a block is to be saved as soon as it is registered; False if only when it is evicted.
    """

    saves_registered: bool

    def has(self, group: int, digest: bytes) -> bool: ...

    def find(self, group: int, digest: bytes) -> np.ndarray | None:
        """Returns the block's bytes, which nobody writes to; None if it is not there."""
        ...

    def note_admitted(self, loaded: Iterable[tuple[int, bytes]], num_missing: int) -> None:
        """Records that a sequence was admitted.

        Args:
          loaded: Groups and digests of the blocks that it takes from here.
          num_missing: Full blocks of its prompt that were found nowhere.
        """
        ...

    def remove(self, digests: Iterable[bytes]) -> None:
        """Removes the blocks of these digests in all groups, including those on their way here."""
        ...

    def clear(self) -> None:
        """Removes all blocks, including those on their way here."""
        ...


class StoredBlocks(BlockConnector):
    """The block connector between a store and the block manager of a data rank. It collects the moves of the next step.

    An evicted block keeps its contents until the next step runs, and the moves of that step come before it.

    Args:
      store: Store to which blocks are saved.
      state_group: Group of recurrent states, which are replaced too often to save each; None if there is none.
      inner: Another connector that gets the same calls.
    """

    def __init__(self, store: BlockStore, state_group: int | None, inner: BlockConnector = NO_CONNECTOR) -> None:
        self._store, self._state_group, self._inner = store, state_group, inner
        self._saves: dict[BlockKey, int] = {}
        self._loads: list[LoadedBlock] = []

    def has(self, group: int, digest: bytes) -> bool:
        return self._store.has(group, digest)

    def find(self, group: int, digest: bytes) -> np.ndarray | None:
        return self._store.find(group, digest)

    def registered(self, group: int, digest: bytes, block_id: int) -> None:
        """Saves the block if the store has a disk."""
        self._inner.registered(group, digest, block_id)
        if self._store.saves_registered and group != self._state_group:
            self.save(group, digest, block_id)

    def unregistered(self, group: int, digest: bytes, block_id: int, *, evicted: bool) -> None:
        """Saves the block if it is evicted."""
        self._inner.unregistered(group, digest, block_id, evicted=evicted)
        if evicted:
            self.save(group, digest, block_id)
        else:
            self._saves.pop((group, digest), None)

    def allocated(
        self, sequence: ScheduledSequence, num_blocks: int, loads: Sequence[LoadedBlock], num_missing: int
    ) -> None:
        """Queues the loads."""
        self._inner.allocated(sequence, num_blocks, loads, num_missing)
        keys = [(load.group, load.digest) for load in loads]
        for key in keys:
            self._saves.pop(key, None)  # queued if the store had evicted the block; it would run before the load
        self._loads += loads
        self._store.note_admitted(keys, num_missing)

    def computed(self, sequence: ScheduledSequence, first: int, stop: int) -> None:
        self._inner.computed(sequence, first, stop)

    def take_moves(self) -> BlockMoves:
        if not self._saves and not self._loads:
            return NO_MOVES
        saves = tuple(SavedBlock(group, digest, block_id) for (group, digest), block_id in self._saves.items())
        moves = BlockMoves(saves, tuple(self._loads))
        self._saves, self._loads = {}, []
        return moves

    def removed(self, digests: Iterable[bytes]) -> None:
        self._inner.removed(digests)
        self._store.remove(digests)

    def cleared(self) -> None:
        self._inner.cleared()
        self._store.clear()

    def save(self, group: int, digest: bytes, block_id: int) -> None:
        """Queues a block to be saved, unless it is in the store."""
        if not self._store.has(group, digest):
            self._saves[group, digest] = block_id


@dataclasses.dataclass
class _Transfer:
    """A prompt that is computed for another engine.

    Attributes:
      keys: Keys of the blocks that the other engine needs. Layers with a window or a state need only the last blocks.
      num_copied: Leading blocks of the sequence whose needed copies were dispatched.
    """

    keys: list[BlockKey]
    num_copied: int = 0


class StoreConnector(KVConnector):
    """The KV connector of an engine with a store, and possibly with other engines.

    Args:
      programs: Programs of the model with the caches.
      store: Store of the blocks.
      peers: Other engines that blocks go to or come from; None: there are none.
      inner: Another connector that gets the same calls.
    """

    def __init__(self, programs: Programs, store: KVStore, peers: Peers | None, inner: KVConnector) -> None:
        self.store, self.peers, self._inner = store, peers, inner
        self._transfer = BlockTransfer(programs, store)
        plan = programs.executor.plan
        self._state_group = None if plan.num_state_slots is None else len(plan.num_blocks)
        self._stored: list[StoredBlocks] = []
        self._ranks: list[tuple[BlockManager, StoredBlocks]] = []
        self._transfers: dict[str, _Transfer] = {}
        client = None if peers is None else peers.client
        self._fetcher = BlockFetcher(store, client) if store.has_disk or client is not None else None

    @property
    def stats(self) -> dict[str, TierStats]:
        stats = {**self._inner.stats, **self.store.stats}
        return stats if self.peers is None else stats | {"peer": self.peers.stats}

    def block_connectors(self, num_ranks: int) -> list[StoredBlocks]:
        inner = self._inner.block_connectors(num_ranks)
        self._stored = [StoredBlocks(self.store, self._state_group, blocks) for blocks in inner]
        return self._stored

    def begin(self, scheduler: Scheduler | DataRanksScheduler) -> None:
        """Drops copies on their way to the store, whose steps were not read."""
        self._inner.begin(scheduler)
        self._scheduler = scheduler
        self._ranks = [(rank.block_manager, blocks) for rank, blocks in zip(scheduler.ranks, self._stored, strict=True)]
        self._transfer.drop()

    def fetches(self, params: SamplingParams) -> bool:
        if self._fetcher is None or params.computes_whole_prompt:
            return False
        return self.store.has_disk or (params.kv_transfer is not None and params.kv_transfer.peer is not None)

    def fetch(
        self,
        prompt_token_ids: Sequence[int],
        cache_salt: str | None,
        params: SamplingParams,
        deadline: Deadline | None = None,
    ) -> None:
        if self._fetcher is not None and self.fetches(params):
            blocks = self._scheduler.block_manager
            self._fetcher.fetch(blocks, prompt_token_ids, cache_salt, params.kv_transfer, deadline)

    def check(self, params: SamplingParams) -> None:
        if self.peers is None:
            super().check(params)

    def request_added(self, sequence: ScheduledSequence) -> None:
        """Marks the blocks of a prompt for another engine, so that they are saved as they are computed."""
        self._inner.request_added(sequence)
        wants = sequence.sampling_params.kv_transfer
        if self.peers is None or not self.peers.hands_over or wants is None or not wants.do_remote_decode:
            return
        blocks, _ = self._ranks[0]
        digests = blocks.prompt_digests(sequence)
        keys = [(group, digests[index]) for group, index in blocks.search.blocks_of(len(digests))]
        self._transfers[sequence.seq_id.request_id] = _Transfer(keys)
        self.store.expect(keys, wants.transfer_id)

    def step_dispatching(self, output: SchedulerOutput) -> None:
        self._inner.step_dispatching(output)
        self._transfer.dispatch(output)

    def step_dispatched(self, output: SchedulerOutput) -> None:
        """Dispatches copies of blocks that the step fills and another engine needs."""
        self._inner.step_dispatched(output)
        if self._transfers:
            parts = zip(self._ranks, output.ranks, strict=True)
            self._transfer.dispatch_filled([self._filled(blocks, part) for (blocks, _), part in parts])

    def step_read(self, output: SchedulerOutput) -> None:
        """Puts blocks into the store that were saved up to the step."""
        self._inner.step_read(output)
        self._transfer.commit(output)

    def step_done(self) -> None:
        """Finishes the saves that another engine waits for if no step follows."""
        self._inner.step_done()
        if self.store.is_awaited and not self._scheduler.has_unfinished:
            self.idle()

    def request_done(self, sequence: ScheduledSequence, *, answered: bool) -> dict[str, Any] | None:
        """Keeps the blocks of a prompt that was computed for another engine."""
        kv_transfer_params = self._inner.request_done(sequence, answered=answered)
        transfer = self._transfers.pop(sequence.seq_id.request_id, None)
        if transfer is None:
            return kv_transfer_params
        kv_transfer_params = self._hand_over(sequence) if answered else None
        self.store.end_expecting(transfer.keys)
        return kv_transfer_params

    def idle(self) -> None:
        """Saves the blocks computed since the last step."""
        self._inner.idle()
        if not self.store.saves_registered and not self.store.is_awaited:
            return
        for blocks, stored in self._ranks:
            for pool in blocks.states.pools if self.store.saves_registered else ():
                for digest, slot in pool.registered_blocks():
                    stored.save(len(blocks.spans), digest, slot)
        self._transfer.finish([stored.take_moves().saves for _, stored in self._ranks])

    def close(self) -> None:
        """Saves the remaining blocks, and waits a limited time until they are on disk."""
        if self.peers is not None:
            self.peers.close()
        try:
            self.idle()
        except Exception:
            _logger.warning("the last blocks of the KV cache were not saved", exc_info=True)
        self.store.close()
        self._inner.close()

    def _filled(self, blocks: BlockManager, part: SchedulerOutput) -> list[SavedBlock]:
        """Returns the blocks of a rank's part of a step that another engine needs and the store does not have."""
        found: list[SavedBlock] = []
        for entry in part.scheduled[part.num_decodes :]:
            transfer = self._transfers.get(entry.sequence.seq_id.request_id)
            if transfer is None or entry.sequence.seq_id.index:
                continue
            start, transfer.num_copied = transfer.num_copied, entry.sequence.num_registered_blocks
            digests = blocks.prompt_digests(entry.sequence)
            for group, index in blocks.search.blocks_of(len(digests)):
                if start <= index < transfer.num_copied and not self.store.has(group, digests[index]):
                    block_id = blocks.block_of(group, digests[index])
                    if block_id is not None:
                        found.append(SavedBlock(group, digests[index], block_id))
        return found

    def _hand_over(self, sequence: ScheduledSequence) -> dict[str, Any] | None:
        """Keeps the blocks of a prompt for another engine. They are in the store, except those that did not fit."""
        assert self.peers is not None
        known = [(_known_prompt(blocks, sequence), blocks, stored) for blocks, stored in self._ranks]
        keys, blocks, stored = max(known, key=lambda of_rank: len(of_rank[0]))
        wants = sequence.sampling_params.kv_transfer
        kv_transfer_params = self.peers.hand_over(keys, None if wants is None else wants.transfer_id)
        if kv_transfer_params is not None:
            for key in keys:
                if (block_id := blocks.block_of(*key)) is not None:
                    stored.save(*key, block_id)
        return kv_transfer_params


def _known_prompt(blocks: BlockManager, sequence: ScheduledSequence) -> list[BlockKey]:
    """Returns the blocks that another sequence with the same prompt would find."""
    digests = blocks.prompt_digests(sequence)
    num_blocks, _ = blocks.search.longest(digests, blocks.is_known)
    return [(group, digests[index]) for group, index in blocks.search.blocks_of(num_blocks)]
