"""Blocks in host memory. Beyond its limit, the least recently used ones are dropped."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

import numpy as np

BlockKey = tuple[int, bytes]
"""Group and digest of a block."""


class HostTier:
    """Blocks in host memory, up to a number of bytes. Not safe for several threads: `KVStore` holds a lock.

    Attributes:
      num_bytes: Current size of all blocks.

    Args:
      max_bytes: Largest size of all blocks together.
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
        block = self._blocks.get(key)
        return self._pinned.get(key) if block is None else block

    def put(self, key: BlockKey, block: np.ndarray, *, pinned: bool = False) -> bool:
        """Adds a block as the most recently used one. Drops unpinned blocks, oldest first, until it fits.

        Args:
          key: Key of the block.
          block: uint8 [N], memory of its own that nobody writes to.
          pinned: True to pin the block, as `pin` does.

        Returns:
          True if the block was added; False if it does not fit beside the pinned blocks.
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
        """Protects a block, if it is here, from being dropped."""
        block = self._blocks.pop(key, None)
        if block is not None:
            self._pinned[key] = block
            self._pinned_bytes += block.nbytes

    def unpin(self, key: BlockKey) -> None:
        """Allows a pinned block to be dropped again, as the most recently used one."""
        block = self._pinned.pop(key, None)
        if block is not None:
            self._blocks[key] = block
            self._pinned_bytes -= block.nbytes

    def touch(self, keys: Iterable[BlockKey]) -> None:
        """Makes blocks the most recently used ones, the last of `keys` the newest."""
        for key in keys:
            if key in self._blocks:
                self._blocks.move_to_end(key)

    def remove(self, key: BlockKey) -> None:
        self.unpin(key)
        block = self._blocks.pop(key, None)
        if block is not None:
            self.num_bytes -= block.nbytes

    def clear(self) -> None:
        self._blocks.clear()
        self._pinned.clear()
        self.num_bytes = self._pinned_bytes = 0
