"""The layout of a block's bytes: on an engine's own devices, and as engines exchange it.

A block in the store has the values of all devices, in the order of the heads. Engines whose devices share the heads
differently therefore have the same bytes. The exception is an engine with more devices than heads, which repeats each
head.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class BlockArray(NamedTuple):
    """A block's part of one array, such as the keys and values of a layer.

    Attributes:
      shape: Shape of the part.
      item_bytes: Size of an element.
      head_axis: Axis of the heads in `shape`.
      num_heads: Length of that axis, repeated heads included.
      copies: Number of consecutive copies of each head.
    """

    shape: tuple[int, ...]
    item_bytes: int
    head_axis: int = 0
    num_heads: int = 1
    copies: int = 1

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.item_bytes

    @property
    def once(self) -> BlockArray:
        """The same array with each head once."""
        shape = list(self.shape)
        if self.copies > 1:
            shape[self.head_axis] //= self.copies
        return self._replace(shape=tuple(shape), num_heads=self.num_heads // self.copies, copies=1)

    def heads(self, data: np.ndarray) -> np.ndarray:
        """Returns the part's bytes, uint8 [N], as [before, num_heads, bytes of a head]."""
        before = math.prod(self.shape[: self.head_axis])
        return data.reshape(before, self.num_heads, -1)


class StoredBlockLayout:
    """Converts blocks between the layout of this engine and the exchanged one, which has each head once.

    Attributes:
      shared_bytes: Size of an exchanged block of each group.
      repeats: True if this engine's layout differs from the exchanged one.

    Args:
      groups: Arrays of each group, in the order in which a block has them.
    """

    def __init__(self, groups: Sequence[Sequence[BlockArray]]) -> None:
        self._groups = [list(group) for group in groups]
        self.shared_bytes = tuple(sum(array.once.num_bytes for array in group) for group in groups)
        self.repeats = any(array.copies > 1 for group in groups for array in group)

    def to_shared(self, group: int, block: np.ndarray) -> np.ndarray:
        """Converts a block, uint8 [N], from this engine's layout to the exchanged one."""
        if not self.repeats:
            return block
        parts, start = [], 0
        for array in self._groups[group]:
            heads = array.heads(block[start : start + array.num_bytes])
            parts.append(heads[:, :: array.copies].ravel())
            start += array.num_bytes
        return np.concatenate(parts)

    def from_shared(self, group: int, data: np.ndarray) -> np.ndarray:
        """Converts a block, uint8 [N], from the exchanged layout to this engine's."""
        if not self.repeats:
            return data
        parts, start = [], 0
        for array in self._groups[group]:
            once = array.once
            heads = once.heads(data[start : start + once.num_bytes])
            parts.append(np.repeat(heads, array.copies, axis=1).ravel())
            start += once.num_bytes
        return np.concatenate(parts)
