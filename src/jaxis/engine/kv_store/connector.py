"""An engine's KV cache blocks beyond its devices: what it saves, fetches, and hands to other engines."""

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
    """What `StoredBlocks` needs of a store; see `KVStore`.

    Other threads may add and evict blocks at any time: what `has` has said need not be there for `find`.

    Attributes:
      saves_registered: Whether a block is to be saved as soon as it is registered, not only when it is evicted.
    """

    saves_registered: bool

    def has(self, group: int, digest: bytes) -> bool:
        """Whether the block is there."""
        ...

    def find(self, group: int, digest: bytes) -> np.ndarray | None:
        """The block's bytes, which nobody writes to; None if it is not there."""
        ...

    def note_admitted(self, loaded: Iterable[tuple[int, bytes]], num_missing: int) -> None:
        """Notes that a sequence was admitted.

        Args:
          loaded: The groups and digests of the blocks that it takes from here.
          num_missing: Full blocks of its prompt that were found nowhere.
        """
        ...

    def remove(self, digests: Iterable[bytes]) -> None:
        """Removes the blocks of these digests, whatever their groups, and those on their way here."""
        ...

    def clear(self) -> None:
        """Removes all blocks, and those on their way here."""
        ...


class StoredBlocks(BlockConnector):
    """The blocks in a store, for the block manager of a data rank; collects the moves of its next step.

    A block that is evicted still has its contents until the next step runs, and that step's moves come before it.

    Args:
      store: Where blocks are saved to.
      state_group: The group of recurrent states, which are superseded too often to save each; None if there is none.
      inner: Told of the same.
    """

    def __init__(self, store: BlockStore, state_group: int | None, inner: BlockConnector = NO_CONNECTOR) -> None:
        self._store, self._state_group, self._inner = store, state_group, inner
        self._saves: dict[BlockKey, int] = {}
        self._loads: list[LoadedBlock] = []

    def has(self, group: int, digest: bytes) -> bool:
        """See `BlockConnector`."""
        return self._store.has(group, digest)

    def find(self, group: int, digest: bytes) -> np.ndarray | None:
        """See `BlockConnector`."""
        return self._store.find(group, digest)

    def registered(self, group: int, digest: bytes, block_id: int) -> None:
        """Saves a block that is to outlive the process."""
        self._inner.registered(group, digest, block_id)
        if self._store.saves_registered and group != self._state_group:
            self.save(group, digest, block_id)

    def unregistered(self, group: int, digest: bytes, block_id: int, *, evicted: bool) -> None:
        """Saves a block that is evicted."""
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
            self._saves.pop(key, None)  # if the store has just evicted it: saves come before loads
        self._loads += loads
        self._store.note_admitted(keys, num_missing)

    def computed(self, sequence: ScheduledSequence, first: int, stop: int) -> None:
        """See `BlockConnector`."""
        self._inner.computed(sequence, first, stop)

    def take_moves(self) -> BlockMoves:
        """See `BlockConnector`."""
        if not self._saves and not self._loads:
            return NO_MOVES
        saves = tuple(SavedBlock(group, digest, block_id) for (group, digest), block_id in self._saves.items())
        moves = BlockMoves(saves, tuple(self._loads))
        self._saves, self._loads = {}, []
        return moves

    def removed(self, digests: Iterable[bytes]) -> None:
        """See `BlockConnector`."""
        self._inner.removed(digests)
        self._store.remove(digests)

    def cleared(self) -> None:
        """See `BlockConnector`."""
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
      keys: Of the blocks that the other engine needs: of layers with a window or a state, only the end.
      num_copied: Leading blocks of the sequence that were copied off the devices as far as they are needed.
    """

    keys: list[BlockKey]
    num_copied: int = 0


class StoreConnector(KVConnector):
    """An engine's blocks in its store, and the ways into it and out of it.

    Attributes:
      store: Has the blocks.
      peers: Other engines that blocks go to or come from; None: there are none.

    Args:
      programs: Of the model with the caches.
      store: See above.
      peers: See above.
      inner: Told of the same.
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
        """See `KVConnector`."""
        stats = {**self._inner.stats, **self.store.stats}
        return stats if self.peers is None else stats | {"peer": self.peers.stats}

    def block_connectors(self, num_ranks: int) -> list[StoredBlocks]:
        """See `KVConnector`."""
        inner = self._inner.block_connectors(num_ranks)
        self._stored = [StoredBlocks(self.store, self._state_group, blocks) for blocks in inner]
        return self._stored

    def begin(self, scheduler: Scheduler | DataRanksScheduler) -> None:
        """Drops what was on its way to the store: of steps that were not read."""
        self._inner.begin(scheduler)
        self._scheduler = scheduler
        self._ranks = [(rank.block_manager, blocks) for rank, blocks in zip(scheduler.ranks, self._stored, strict=True)]
        self._transfer.drop()

    def fetches(self, params: SamplingParams) -> bool:
        """See `KVConnector`."""
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
        """Fetches what the disk or another engine has of a prompt; see `KVConnector`."""
        if self._fetcher is not None and self.fetches(params):
            blocks = self._scheduler.block_manager
            self._fetcher.fetch(blocks, prompt_token_ids, cache_salt, params.kv_transfer, deadline)

    def check(self, params: SamplingParams) -> None:
        """See `KVConnector`."""
        if self.peers is None:
            super().check(params)

    def request_added(self, sequence: ScheduledSequence) -> None:
        """Has a prompt's blocks saved as they are computed, if they are for another engine."""
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
        """Dispatches the step's moves."""
        self._inner.step_dispatching(output)
        self._transfer.dispatch(output)

    def step_dispatched(self, output: SchedulerOutput) -> None:
        """Dispatches the copies of blocks that the step fills, and that another engine needs."""
        self._inner.step_dispatched(output)
        if self._transfers:
            parts = zip(self._ranks, output.ranks, strict=True)
            self._transfer.dispatch_filled([self._filled(blocks, part) for (blocks, _), part in parts])

    def step_read(self, output: SchedulerOutput) -> None:
        """What was saved up to the step can be found from now on."""
        self._inner.step_read(output)
        self._transfer.commit(output)

    def step_done(self) -> None:
        """Finishes the saves that another engine waits for, if no step follows."""
        self._inner.step_done()
        if self.store.is_awaited and not self._scheduler.has_unfinished:
            self.idle()

    def request_done(self, sequence: ScheduledSequence, *, answered: bool) -> dict[str, Any] | None:
        """Keeps the blocks of a prompt that was computed for another engine; see `KVConnector`."""
        kv_transfer_params = self._inner.request_done(sequence, answered=answered)
        transfer = self._transfers.pop(sequence.seq_id.request_id, None)
        if transfer is None:
            return kv_transfer_params
        kv_transfer_params = self._hand_over(sequence) if answered else None
        self.store.end_expecting(transfer.keys)
        return kv_transfer_params

    def idle(self) -> None:
        """Saves what was computed since the last step."""
        self._inner.idle()
        if not self.store.saves_registered and not self.store.is_awaited:
            return
        for blocks, stored in self._ranks:
            if self.store.saves_registered and blocks.states is not None:
                for digest, slot in blocks.states.pool.registered_blocks():
                    stored.save(len(blocks.spans), digest, slot)
        self._transfer.finish([stored.take_moves().saves for _, stored in self._ranks])

    def close(self) -> None:
        """Saves what is left, and waits until it is on disk, for a while."""
        if self.peers is not None:
            self.peers.close()
        try:
            self.idle()
        except Exception:
            _logger.warning("the last blocks of the KV cache were not saved", exc_info=True)
        self.store.close()
        self._inner.close()

    def _filled(self, blocks: BlockManager, part: SchedulerOutput) -> list[SavedBlock]:
        """What a rank's part of a step has computed that another engine needs and the store does not have."""
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
        """Keeps the blocks of a prompt, which are in the store but for those that had no room, for another engine."""
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
    """What another sequence with the same prompt would find."""
    digests = blocks.prompt_digests(sequence)
    num_blocks, _ = blocks.search.longest(digests, blocks.is_known)
    return [(group, digests[index]) for group, index in blocks.search.blocks_of(num_blocks)]
