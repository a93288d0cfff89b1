"""Events of the prefix cache's blocks, for readers outside the engine."""

from __future__ import annotations

from collections.abc import Sequence as AbstractSequence
from typing import NamedTuple

from jaxis.engine.scheduling.block_connector import BlockConnector, LoadedBlock
from jaxis.engine.scheduling.sequence import Sequence


class BlocksStored(NamedTuple):
    """Consecutive blocks of a sequence can be found from now on.

    Attributes:
      group: Number of their group of layers, as in `BlockManager`.
      digests: Digests of the blocks.
      parent: Digest of the block before the first; None if the first one begins the sequence.
      token_ids: Tokens of the blocks, `block_size` each.
      cache_salt: Salt of the sequence.
    """

    group: int
    digests: tuple[bytes, ...]
    parent: bytes | None
    token_ids: list[int]
    cache_salt: str | None


class BlocksRemoved(NamedTuple):
    """Blocks of a group can no longer be found."""

    group: int
    digests: list[bytes]


class BlocksCleared(NamedTuple):
    """No block of any group can be found any more."""


CacheEvent = BlocksStored | BlocksRemoved | BlocksCleared


class CacheEventRecorder(BlockConnector):
    """Collects the events of a data rank in their order.

    A pool knows only the digests of its blocks. A registered block is recorded once its sequence, and so its tokens,
    are known.

    Args:
      num_groups: Number of groups with attention; blocks of other pools are not recorded.
      block_size: Tokens of a block.
    """

    def __init__(self, num_groups: int, block_size: int) -> None:
        self._num_groups, self._block_size = num_groups, block_size
        self._events: list[CacheEvent] = [BlocksCleared()]
        self._registered: set[tuple[int, bytes]] = set()  # registered blocks that are not recorded yet

    def registered(self, group: int, digest: bytes, block_id: int) -> None:  # noqa: ARG002
        if group < self._num_groups:
            self._registered.add((group, digest))

    def unregistered(self, group: int, digest: bytes, block_id: int, *, evicted: bool) -> None:  # noqa: ARG002
        if (group, digest) in self._registered:
            self._registered.remove((group, digest))
        elif group < self._num_groups:
            last = self._events[-1] if self._events else None
            if isinstance(last, BlocksRemoved) and last.group == group:
                last.digests.append(digest)
            else:
                self._events.append(BlocksRemoved(group, [digest]))

    def allocated(
        self,
        sequence: Sequence,
        num_blocks: int,
        loads: AbstractSequence[LoadedBlock],
        num_missing: int,  # noqa: ARG002
    ) -> None:
        if loads:
            self.computed(sequence, 0, num_blocks)

    def computed(self, sequence: Sequence, first: int, stop: int) -> None:
        """Records the sequence's blocks from `first` up to `stop` that were registered and are not recorded yet."""
        if not self._registered:
            return
        digests = sequence.block_digests
        for group in range(self._num_groups):
            indices = [i for i in range(first, stop) if (group, digests[i]) in self._registered]
            for start, end in _runs(indices):
                parent = digests[start - 1] if start else None
                tokens = sequence.token_ids(start * self._block_size, end * self._block_size)
                self._events.append(BlocksStored(group, tuple(digests[start:end]), parent, tokens, sequence.cache_salt))
                self._registered.difference_update((group, digest) for digest in digests[start:end])

    def cleared(self) -> None:
        """Records that the cache is empty, which replaces all earlier events."""
        self._registered.clear()
        self._events = [BlocksCleared()]

    def take(self) -> list[CacheEvent]:
        events, self._events = self._events, []
        return events


def _runs(indices: list[int]) -> list[tuple[int, int]]:
    """Groups rising numbers into ranges [first, stop) of consecutive ones."""
    runs: list[tuple[int, int]] = []
    for index in indices:
        if runs and runs[-1][1] == index:
            runs[-1] = (runs[-1][0], index + 1)
        else:
            runs.append((index, index + 1))
    return runs
