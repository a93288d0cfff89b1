"""The interface between a block manager and the code that keeps, or follows, blocks beyond the devices."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as AbstractSequence
from typing import TYPE_CHECKING, NamedTuple

from jaxis.engine.scheduling.sequence import Sequence

if TYPE_CHECKING:
    import numpy as np


class SavedBlock(NamedTuple):
    """A block to copy off the device, with the group and digest by which it is found afterwards."""

    group: int
    digest: bytes
    block_id: int


class LoadedBlock(NamedTuple):
    """A block to copy to the device; its `data` comes from `BlockConnector.find`."""

    group: int
    digest: bytes
    block_id: int
    data: np.ndarray


class BlockMoves(NamedTuple):
    """The copies to make, saves first, before the step that they were scheduled with runs."""

    saves: tuple[SavedBlock, ...] = ()
    loads: tuple[LoadedBlock, ...] = ()


NO_MOVES = BlockMoves()


class BlockConnector:
    """The blocks beyond the devices, for the block manager of one data rank. This base class keeps none.

    A block is named by the number of its group (see `BlockManager`; recurrent states are the last group) and its
    digest. Subclasses override what they need. The scheduler's thread calls all methods; other threads may call `has`.
    """

    def has(self, group: int, digest: bytes) -> bool:  # noqa: ARG002
        """Returns whether a block is kept beyond the device. It may be gone by the time `find` is called."""
        return False

    def find(self, group: int, digest: bytes) -> np.ndarray | None:  # noqa: ARG002
        """Returns the block's bytes, which must not be written to; None if the block is not kept."""
        return None

    def registered(self, group: int, digest: bytes, block_id: int) -> None:
        """Notes that a block can be found on the device from now on; a dispatched step, or the next one, fills it."""

    def unregistered(self, group: int, digest: bytes, block_id: int, *, evicted: bool) -> None:
        """Notes that a block cannot be found on the device any more.

        If it is `evicted`, it is about to be reused; otherwise its contents are to be forgotten.
        """

    def allocated(
        self, sequence: Sequence, num_blocks: int, loads: AbstractSequence[LoadedBlock], num_missing: int
    ) -> None:
        """Notes that a sequence was admitted, whose known prefix has `num_blocks` blocks.

        Args:
          sequence: The sequence.
          num_blocks: Blocks of its known prefix.
          loads: Blocks that `find` returned, with the blocks of the device to copy them into.
          num_missing: Full blocks of its prompt that were found nowhere.
        """

    def computed(self, sequence: Sequence, first: int, stop: int) -> None:
        """Notes that a sequence's blocks from `first` up to `stop` are full; those without an equal were registered."""

    def take_moves(self) -> BlockMoves:
        """Returns the copies to make before the step that was scheduled last runs; called once for each step."""
        return NO_MOVES

    def removed(self, digests: Iterable[bytes]) -> None:
        """Forgets all blocks with these digests, in every group and place."""

    def cleared(self) -> None:
        """Forgets all blocks, in every place."""


NO_CONNECTOR = BlockConnector()
