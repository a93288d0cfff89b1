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

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._blocks

    def __len__(self) -> int:
        return len(self._blocks)

    def find(self, key: BlockKey) -> np.ndarray | None:
        """A block's bytes; None if it is not here."""
        return self._blocks.get(key)

    def put(self, key: BlockKey, block: np.ndarray) -> None:
        """Adds a block, as the one used last; one that is larger than the tier is dropped.

        Args:
          key: What it is found by.
          block: uint8 [N], memory of its own that nobody writes to.
        """
        self.remove(key)
        if block.nbytes > self.max_bytes:
            return
        while self.num_bytes + block.nbytes > self.max_bytes:
            _, oldest = self._blocks.popitem(last=False)
            self.num_bytes -= oldest.nbytes
        self._blocks[key] = block
        self.num_bytes += block.nbytes

    def touch(self, keys: Iterable[BlockKey]) -> None:
        """Makes blocks those used last."""
        for key in keys:
            if key in self._blocks:
                self._blocks.move_to_end(key)

    def remove(self, key: BlockKey) -> None:
        """Removes a block if it is here."""
        block = self._blocks.pop(key, None)
        if block is not None:
            self.num_bytes -= block.nbytes

    def clear(self) -> None:
        """Removes all blocks."""
        self._blocks.clear()
        self.num_bytes = 0
