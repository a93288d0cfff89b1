"""The interface between a block manager and the code that keeps, or follows, blocks beyond the devices."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as AbstractSequence
from typing import TYPE_CHECKING, NamedTuple

from jaxis.engine.scheduling.sequence import Sequence

if TYPE_CHECKING:
    import numpy as np


class SavedBlock(NamedTuple):
    """A block to copy off the device, and the group and digest by which it is found afterwards."""

    group: int
    digest: bytes
    block_id: int


class LoadedBlock(NamedTuple):
    """A block to copy to the device, as `BlockConnector.find` gave it."""

    group: int
    digest: bytes
    block_id: int
    data: np.ndarray


class BlockMoves(NamedTuple):
    """Copies to make, saves first, before the step that they were scheduled with runs."""

    saves: tuple[SavedBlock, ...] = ()
    loads: tuple[LoadedBlock, ...] = ()


NO_MOVES = BlockMoves()


class BlockConnector:
    """The blocks beyond the devices, for the block manager of one data rank. This base class keeps none.

    Blocks are named by the number of their group (see `BlockManager`; recurrent states are the last) and their digest.
    Subclasses override what they need. The scheduler's thread calls all methods; other threads may call `has`.
    """

    def has(self, group: int, digest: bytes) -> bool:  # noqa: ARG002
        """Whether a block is kept beyond the device. It may be gone by the time `find` is called."""
        return False

    def find(self, group: int, digest: bytes) -> np.ndarray | None:  # noqa: ARG002
        """The block's bytes, which must not be written to; None if the block is not kept."""
        return None

    def registered(self, group: int, digest: bytes, block_id: int) -> None:
        """A block can be found on the device from now on; a step that was, or is about to be, dispatched fills it."""

    def unregistered(self, group: int, digest: bytes, block_id: int, *, evicted: bool) -> None:
        """A block cannot be found on the device any more.

        Args:
          group: The pool's number.
          digest: What the block was found by.
          block_id: The block.
          evicted: Whether the block is about to be reused; otherwise, its contents are to be forgotten.
        """

    def allocated(
        self, sequence: Sequence, num_blocks: int, loads: AbstractSequence[LoadedBlock], num_missing: int
    ) -> None:
        """A sequence was admitted.

        Args:
          sequence: The sequence.
          num_blocks: Blocks of its known prefix.
          loads: Blocks that `find` gave, with the blocks of the device to copy them into.
          num_missing: Full blocks of its prompt that were found nowhere.
        """

    def computed(self, sequence: Sequence, first: int, stop: int) -> None:
        """The blocks of a sequence from `first` up to `stop` are full; those without an equal were registered."""

    def take_moves(self) -> BlockMoves:
        """What is to be copied before the step that was scheduled last runs; called once for each step."""
        return NO_MOVES

    def removed(self, digests: Iterable[bytes]) -> None:
        """The blocks of these digests, whatever their groups, must not be found anywhere any more."""

    def cleared(self) -> None:
        """No block must be found anywhere any more."""


NO_CONNECTOR = BlockConnector()
