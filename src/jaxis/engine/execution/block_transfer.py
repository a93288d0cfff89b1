"""Copies blocks between an executor's caches and a store, in the order of its calls."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np

from jaxis.engine.execution.block_programs import BLOCKS_PER_CALL, LoadKey, SaveKey
from jaxis.engine.execution.executor import Executor
from jaxis.engine.kv_store.store import KVStore
from jaxis.engine.scheduling.block_moves import LoadedBlock, SavedBlock
from jaxis.engine.scheduling.scheduler import SchedulerOutput

_logger = logging.getLogger(__name__)
Block = TypeVar("Block", SavedBlock, LoadedBlock)


class _Saved(NamedTuple):
    """Blocks on their way to the store, and the store's epoch when they left."""

    blocks: Sequence[SavedBlock]
    arrays: list[Any]
    epoch: int


class BlockTransfer:
    """Makes the moves of each step.

    A copy off the devices is dispatched before the step that overwrites the block, so it is of the old contents. It
    goes into the store once that step was read: had a step before it failed, so would have the reading.

    Attributes:
      store: Where blocks go.

    Args:
      executor: Of the caches.
      store: See above.
    """

    def __init__(self, executor: Executor, store: KVStore) -> None:
        self.store = store
        self._executor = executor
        self._pending: deque[tuple[SchedulerOutput | None, list[_Saved]]] = deque()

    def dispatch(self, output: SchedulerOutput) -> None:
        """Dispatches a step's moves; the step itself is to follow."""
        saves, loads = output.moves or ((), ())
        self._pending.append((output, self._dispatch_saves(saves)))
        for blocks in _calls(loads):
            self._load(blocks)

    def finish(self, saves: Sequence[SavedBlock]) -> None:
        """Saves blocks with no step to follow, and puts in the store all that was saved; waits for the devices."""
        self._pending.append((None, self._dispatch_saves(saves)))
        self._commit(None)

    def commit(self, output: SchedulerOutput) -> None:
        """Puts in the store what was saved up to a step that was read."""
        if any(step is output for step, _ in self._pending):
            self._commit(output)

    def drop(self) -> None:
        """Drops all that is not in the store yet: of steps that were not read."""
        self._pending.clear()

    def _dispatch_saves(self, saves: Sequence[SavedBlock]) -> list[_Saved]:
        saved = []
        for blocks in _calls(saves):
            key = SaveKey(blocks[0].group, len(blocks))
            try:
                saved.append(_Saved(blocks, self._executor.save_blocks(key, _ids(blocks)), self.store.epoch))
            except jax.errors.JaxRuntimeError:  # no memory for the copy
                _logger.warning("blocks of the KV cache could not be copied", exc_info=True)
                self.store.note_failed(len(blocks))
        return saved

    def _load(self, blocks: Sequence[LoadedBlock]) -> None:
        key = LoadKey(blocks[0].group, len(blocks))
        structs, treedef = jax.tree.flatten(self._executor.block_programs.block_structs(key.group, key.num_blocks))
        arrays, start = [], 0
        for struct in structs:
            array = np.empty(struct.shape, struct.dtype)
            rows = array.reshape(len(blocks), -1).view(np.uint8)
            for row, block in zip(rows, blocks, strict=True):
                row[:] = block.data[start : start + len(row)]
            start += rows.shape[1]
            arrays.append(array)
        self._executor.load_blocks(key, _ids(blocks), jax.tree.unflatten(treedef, arrays))

    def _commit(self, output: SchedulerOutput | None) -> None:
        while self._pending:
            step, saved = self._pending.popleft()
            for each in saved:
                self._put(*each)
            if step is output:
                return

    def _put(self, blocks: Sequence[SavedBlock], arrays: list[Any], epoch: int) -> None:
        try:
            # [n, bytes] of each array; on CPU they are the arrays' own.
            rows = [np.asarray(leaf).reshape(len(blocks), -1).view(np.uint8) for leaf in jax.tree.leaves(arrays)]
        except jax.errors.JaxRuntimeError:
            _logger.warning("blocks of the KV cache could not be copied", exc_info=True)
            self.store.note_failed(len(blocks))
            return
        for index, block in enumerate(blocks):
            self.store.put((block.group, block.digest), np.concatenate([row[index] for row in rows]), epoch)


def _ids(blocks: Sequence[SavedBlock] | Sequence[LoadedBlock]) -> np.ndarray:
    return np.array([block.block_id for block in blocks], np.int32)


def _calls(blocks: Sequence[Block]) -> Iterator[Sequence[Block]]:
    """The blocks by group, in as many at a time as there are programs for."""
    for _, group in groupby(sorted(blocks, key=lambda block: block.group), key=lambda block: block.group):
        left = list(group)
        while left:
            number = next(number for number in BLOCKS_PER_CALL if number <= len(left))
            yield left[:number]
            left = left[number:]
