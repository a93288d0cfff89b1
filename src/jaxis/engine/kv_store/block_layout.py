"""The bytes of a block, on an engine's own devices and on the way to an engine with another number of them.

A block in the store has the values of all devices, heads in their order. So engines whose devices share the heads
differently have the same bytes, except where there are more devices than heads: those repeat each head.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class BlockArray(NamedTuple):
    """One of the arrays that a block has a part of, such as a layer's keys and values.

    Attributes:
      shape: Of the part.
      item_bytes: Of an element.
      head_axis: Of the shape: that of the heads.
      num_heads: How many there are along it, repeated ones included.
      copies: How often each is repeated, one after the other.
    """

    shape: tuple[int, ...]
    item_bytes: int
    head_axis: int = 0
    num_heads: int = 1
    copies: int = 1

    @property
    def num_bytes(self) -> int:
        """Bytes of the part."""
        return math.prod(self.shape) * self.item_bytes

    @property
    def once(self) -> BlockArray:
        """The same with each head once."""
        shape = list(self.shape)
        if self.copies > 1:
            shape[self.head_axis] //= self.copies
        return self._replace(shape=tuple(shape), num_heads=self.num_heads // self.copies, copies=1)

    def heads(self, data: np.ndarray) -> np.ndarray:
        """Its bytes, uint8 [N], as [before, num_heads, bytes of a head]."""
        before = math.prod(self.shape[: self.head_axis])
        return data.reshape(before, self.num_heads, -1)


class StoredBlockLayout:
    """Converts blocks between their layout here and the one in which engines exchange them, with each head once.

    Attributes:
      shared_bytes: Bytes of an exchanged block of each group.
      repeats: Whether the layout here is another one.

    Args:
      groups: The arrays of each group, in the order in which a block has them.
    """

    def __init__(self, groups: Sequence[Sequence[BlockArray]]) -> None:
        self._groups = [list(group) for group in groups]
        self.shared_bytes = tuple(sum(array.once.num_bytes for array in group) for group in groups)
        self.repeats = any(array.copies > 1 for group in groups for array in group)

    def to_shared(self, group: int, block: np.ndarray) -> np.ndarray:
        """A block as it is here, uint8 [N], as it is exchanged."""
        if not self.repeats:
            return block
        parts, start = [], 0
        for array in self._groups[group]:
            heads = array.heads(block[start : start + array.num_bytes])
            parts.append(heads[:, :: array.copies].ravel())
            start += array.num_bytes
        return np.concatenate(parts)

    def from_shared(self, group: int, data: np.ndarray) -> np.ndarray:
        """A block as it is exchanged, uint8 [N], as it is here."""
        if not self.repeats:
            return data
        parts, start = [], 0
        for array in self._groups[group]:
            once = array.once
            heads = once.heads(data[start : start + once.num_bytes])
            parts.append(np.repeat(heads, array.copies, axis=1).ravel())
            start += once.num_bytes
        return np.concatenate(parts)
