"""Which blocks a step copies off the device before it runs, and which ones it copies there."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    import numpy as np


class BlockStore(Protocol):
    """Blocks that are kept beyond the device, by the index of their group and their digest.

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


class SavedBlock(NamedTuple):
    """A block to copy off the device, with what it is found by afterwards."""

    group: int
    digest: bytes
    block_id: int


class LoadedBlock(NamedTuple):
    """A block to copy to the device, as `BlockStore.find` gave it."""

    group: int
    block_id: int
    data: np.ndarray


class BlockMoves(NamedTuple):
    """Copies to make, in this order, before the step of the same output runs."""

    saves: tuple[SavedBlock, ...]
    loads: tuple[LoadedBlock, ...]


class BlockMoveQueue:
    """Collects the moves of the next step; a `BlockObserver` of the pools.

    A block that is evicted still has its contents until the next step runs, and that step's moves come before it.

    Args:
      store: Where blocks are saved to.
      state_group: The group of recurrent states, which are superseded too often to save each; None if there is none.
    """

    def __init__(self, store: BlockStore, state_group: int | None) -> None:
        self._store = store
        self._state_group = state_group
        self._saves: dict[tuple[int, bytes], int] = {}
        self._loads: list[LoadedBlock] = []

    def registered(self, group: int, digest: bytes, block_id: int) -> None:
        """See `BlockObserver`."""
        if self._store.saves_registered and group != self._state_group:
            self.save(group, digest, block_id)

    def unregistered(self, group: int, digest: bytes, block_id: int, *, evicted: bool) -> None:
        """See `BlockObserver`."""
        if evicted:
            self.save(group, digest, block_id)
        else:
            self._saves.pop((group, digest), None)

    def save(self, group: int, digest: bytes, block_id: int) -> None:
        """Queues a block to be saved, unless it is in the store."""
        if not self._store.has(group, digest):
            self._saves[group, digest] = block_id

    def load(self, group: int, digest: bytes, block_id: int, data: np.ndarray) -> None:
        """Queues a registered block to be loaded."""
        self._saves.pop((group, digest), None)  # if the store has just evicted it: saves come before loads
        self._loads.append(LoadedBlock(group, block_id, data))

    def take(self) -> BlockMoves | None:
        """The moves since the last call; None if there are none."""
        if not self._saves and not self._loads:
            return None
        saves = tuple(SavedBlock(group, digest, block_id) for (group, digest), block_id in self._saves.items())
        moves = BlockMoves(saves, tuple(self._loads))
        self._saves, self._loads = {}, []
        return moves
