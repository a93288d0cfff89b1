"""A store of blocks for the simulated engine: a dictionary that evicts at the worst moments."""

from __future__ import annotations

import random
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from typing import Any

from jaxis.engine.scheduling.block_connector import SavedBlock


class SimulatedStore:
    """A `BlockStore`; what it holds is whatever the simulated device holds in a block."""

    def __init__(self, num_blocks: int, *, saves_registered: bool = False, seed: int = 0, loss: float = 0.02) -> None:
        self.num_blocks = num_blocks
        self.saves_registered = saves_registered
        self.blocks: OrderedDict[tuple[int, bytes], Any] = OrderedDict()
        self.num_loaded = 0
        self._on_their_way: deque[dict[tuple[int, bytes], Any]] = deque()
        self._random, self._loss = random.Random(seed), loss

    def has(self, group: int, digest: bytes) -> bool:
        return (group, digest) in self.blocks

    def find(self, group: int, digest: bytes) -> Any | None:
        # Another thread's block may need its place, before or after.
        before, after = (self._random.random() < self._loss for _ in range(2))
        if before:
            self.blocks.pop((group, digest), None)
        content = self.blocks.get((group, digest))
        if after:
            self.blocks.pop((group, digest), None)
        return content

    def note_admitted(self, loaded: Iterable[tuple[int, bytes]], num_missing: int) -> None:
        assert num_missing >= 0
        for key in loaded:
            self.num_loaded += 1
            if key in self.blocks:
                self.blocks.move_to_end(key)

    def remove(self, digests: Iterable[bytes]) -> None:
        digests = set(digests)
        for blocks in (self.blocks, *self._on_their_way):
            for key in [key for key in blocks if key[1] in digests]:
                del blocks[key]

    def clear(self) -> None:
        for blocks in (self.blocks, *self._on_their_way):
            blocks.clear()

    def dispatch(self, saves: Sequence[tuple[SavedBlock, Any]]) -> None:
        """The saves of a step, which are found once the step was read."""
        self._on_their_way.append({(save.group, save.digest): content for save, content in saves})

    def commit(self) -> None:
        """The oldest step was read."""
        self.blocks |= self._on_their_way.popleft()
        while len(self.blocks) > self.num_blocks:
            self.blocks.popitem(last=False)
