"""Copies of blocks between a model's caches and a store, in the order of the programs' calls."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np

from jaxis.engine.execution.block_programs import BLOCKS_PER_CALL, LoadKey, SaveKey, group_structs
from jaxis.engine.execution.programs import Programs
from jaxis.engine.kv_store.host_tier import BlockKey
from jaxis.engine.kv_store.store import KVStore
from jaxis.engine.scheduling.block_connector import LoadedBlock, SavedBlock
from jaxis.engine.scheduling.scheduler_output import SchedulerOutput

_logger = logging.getLogger(__name__)
Block = TypeVar("Block", bound=SavedBlock | LoadedBlock)


class _Saved(NamedTuple):
    """Blocks of each data rank on their way to the store, and the store's epoch when they were copied."""

    of_ranks: Sequence[Sequence[SavedBlock]]
    arrays: list[Any]
    epoch: int


class BlockTransfer:
    """Carries out the block moves of each step.

    A copy off the devices is dispatched before the step that overwrites the block, so it has the old contents. It
    enters the store once that step was read. By then, all earlier steps are known to have succeeded.

    Args:
      programs: Programs of the model with the caches.
      store: Store of the blocks.
    """

    def __init__(self, programs: Programs, store: KVStore) -> None:
        self.store = store
        self._programs = programs
        self._plan = programs.executor.plan
        self._layers_draft = programs.executor.stages[-1].context.num_draft_caches > 0
        self._held: Sequence[Sequence[SavedBlock]] = ()
        self._pending: deque[tuple[SchedulerOutput | None, list[_Saved]]] = deque()

    def dispatch(self, output: SchedulerOutput) -> None:
        """Dispatches a step's moves, right before the step itself."""
        moves = [rank.moves for rank in output.ranks]
        held, self._held = self._held or [()] * len(moves), ()
        saves = [(*earlier, *each.saves) for earlier, each in zip(held, moves, strict=True)]
        self._pending.append((output, self._dispatch_saves(saves)))
        for group, number, of_ranks in _calls([each.loads for each in moves]):
            self._load(LoadKey(group, number), of_ranks)

    def dispatch_filled(self, blocks: Sequence[Sequence[SavedBlock]]) -> None:
        """Dispatches copies of blocks that the newest dispatched step fills.

        Args:
          blocks: Blocks of each data rank.
        """
        if not any(blocks):
            return
        if self._layers_draft:
            # Layers that draft read a step after it, and before the next one: copies wait until then.
            self._held = blocks
            return
        _, saved = self._pending[-1]
        saved += self._dispatch_saves(blocks)

    def finish(self, saves: Sequence[Sequence[SavedBlock]]) -> None:
        """Saves blocks of each rank when no step follows; puts all saved ones into the store. Waits for the devices."""
        self._held = ()  # the caller saves them too, if another engine waits for them
        self._pending.append((None, self._dispatch_saves(saves)))
        self._commit(None)

    def commit(self, output: SchedulerOutput) -> None:
        """Puts blocks into the store that were saved up to a step that was read."""
        if any(step is output for step, _ in self._pending):
            self._commit(output)

    def drop(self) -> None:
        """Drops all blocks that are not in the store yet, since their steps were not read."""
        self._held = ()
        self._pending.clear()
        self.store.forget_promises()

    def _dispatch_saves(self, saves: Sequence[Sequence[SavedBlock]]) -> list[_Saved]:
        saved = []
        for group, number, of_ranks in _calls(saves):
            key = SaveKey(group, number)
            block_ids = _ids(of_ranks, number, np.zeros(number, np.int32))
            try:
                saved.append(_Saved(of_ranks, self._programs.run(key, block_ids), self.store.epoch))
            except jax.errors.JaxRuntimeError:  # no memory for the copy
                _logger.warning("blocks of the KV cache could not be copied", exc_info=True)
                self.store.note_failed(_keys(of_ranks))
        return saved

    def _load(self, key: LoadKey, of_ranks: Sequence[Sequence[LoadedBlock]]) -> None:
        structs, treedef = jax.tree.flatten(group_structs(self._plan, key.group, len(of_ranks) * key.num_blocks))
        arrays, start = [], 0
        for struct in structs:
            array = np.empty(struct.shape, struct.dtype)
            rows = array.reshape(len(array), -1).view(np.uint8)
            for row, block in _rows(of_ranks, key.num_blocks):
                rows[row] = block.data[start : start + rows.shape[1]]
            start += rows.shape[1]
            arrays.append(array)
        # A rank with fewer blocks than others gets ids past all blocks.
        padding = np.iinfo(np.int32).max - np.arange(key.num_blocks, dtype=np.int32)
        block_ids = _ids(of_ranks, key.num_blocks, padding)
        self._programs.run(key, block_ids, iter(jax.tree.unflatten(treedef, arrays)))

    def _commit(self, output: SchedulerOutput | None) -> None:
        while self._pending:
            step, saved = self._pending.popleft()
            for each in saved:
                self._put(*each)
            if step is output:
                return

    def _put(self, of_ranks: Sequence[Sequence[SavedBlock]], arrays: list[Any], epoch: int) -> None:
        try:
            # [D * n, bytes] of each array; of a device that is the CPU they are the array's own.
            rows = [np.asarray(leaf).reshape(len(leaf), -1).view(np.uint8) for leaf in jax.tree.leaves(arrays)]
        except jax.errors.JaxRuntimeError:
            _logger.warning("blocks of the KV cache could not be copied", exc_info=True)
            self.store.note_failed(_keys(of_ranks))
            return
        for index, block in _rows(of_ranks, len(rows[0]) // len(of_ranks)):
            self.store.put((block.group, block.digest), np.concatenate([row[index] for row in rows]), epoch)


def _ids(of_ranks: Sequence[Sequence[SavedBlock | LoadedBlock]], number: int, padding: np.ndarray) -> np.ndarray:
    """Returns the ids of `number` blocks of each rank, int32 [D * number], completed from the padding [number]."""
    block_ids = np.tile(padding, len(of_ranks))
    for row, block in _rows(of_ranks, number):
        block_ids[row] = block.block_id
    return block_ids


def _keys(of_ranks: Sequence[Sequence[SavedBlock]]) -> list[BlockKey]:
    return [(block.group, block.digest) for blocks in of_ranks for block in blocks]


def _rows(of_ranks: Sequence[Sequence[Block]], number: int) -> Iterator[tuple[int, Block]]:
    for rank, blocks in enumerate(of_ranks):
        yield from enumerate(blocks, start=rank * number)


def _calls(of_ranks: Sequence[Sequence[Block]]) -> Iterator[tuple[int, int, Sequence[Sequence[Block]]]]:
    """Groups blocks into the calls of programs.

    Yields:
      The group, the program's number of blocks per rank, and at most that many blocks of each rank.
    """
    for group in sorted({block.group for blocks in of_ranks for block in blocks}):
        left = [[block for block in blocks if block.group == group] for blocks in of_ranks]
        while longest := max(map(len, left)):
            number = next(number for number in BLOCKS_PER_CALL if number <= longest)
            yield group, number, [blocks[:number] for blocks in left]
            left = [blocks[number:] for blocks in left]
