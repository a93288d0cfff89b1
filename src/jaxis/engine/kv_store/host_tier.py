"""Blocks in the host's memory, least recently used ones making room for others."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

import numpy as np

BlockKey = tuple[int, bytes]
"""The group of a block, and its digest."""


class HostTier:
    """A bounded number of bytes of blocks. Not safe for several threads; `KVStore` has the lock.

    Attributes:
      max_bytes: Of all blocks together.
      num_bytes: What they take.

    Args:
      max_bytes: See above.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._blocks: OrderedDict[BlockKey, np.ndarray] = OrderedDict()
        self._pinned: dict[BlockKey, np.ndarray] = {}
        self._pinned_bytes = 0

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._blocks or key in self._pinned

    def __len__(self) -> int:
        return len(self._blocks) + len(self._pinned)

    def find(self, key: BlockKey) -> np.ndarray | None:
        """A block's bytes; None if it is not here."""
        block = self._blocks.get(key)
        return self._pinned.get(key) if block is None else block

    def put(self, key: BlockKey, block: np.ndarray, *, pinned: bool = False) -> bool:
        """Adds a block, as the one used last, unless there is no room beside those that are pinned.

        Args:
          key: What it is found by.
          block: uint8 [N], memory of its own that nobody writes to.
          pinned: See `pin`.

        Returns:
          Whether there was room.
        """
        self.remove(key)
        if block.nbytes > self.max_bytes - self._pinned_bytes:
            return False
        while self.num_bytes + block.nbytes > self.max_bytes:
            _, oldest = self._blocks.popitem(last=False)
            self.num_bytes -= oldest.nbytes
        self._blocks[key] = block
        self.num_bytes += block.nbytes
        if pinned:
            self.pin(key)
        return True

    def pin(self, key: BlockKey) -> None:
        """Keeps a block, if it is here, from making room for others."""
        block = self._blocks.pop(key, None)
        if block is not None:
            self._pinned[key] = block
            self._pinned_bytes += block.nbytes

    def unpin(self, key: BlockKey) -> None:
        """Lets a pinned block make room for others again; it is now the one used last."""
        block = self._pinned.pop(key, None)
        if block is not None:
            self._blocks[key] = block
            self._pinned_bytes -= block.nbytes

    def touch(self, keys: Iterable[BlockKey]) -> None:
        """Makes blocks those used last."""
        for key in keys:
            if key in self._blocks:
                self._blocks.move_to_end(key)

    def remove(self, key: BlockKey) -> None:
        """Removes a block if it is here."""
        self.unpin(key)
        block = self._blocks.pop(key, None)
        if block is not None:
            self.num_bytes -= block.nbytes

    def clear(self) -> None:
        """Removes all blocks."""
        self._blocks.clear()
        self._pinned.clear()
        self.num_bytes = self._pinned_bytes = 0
