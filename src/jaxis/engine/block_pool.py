"""A pool of KV cache blocks: who is free, who is held how often, and which known tokens a block holds."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable


class BlockPool:
    """Reference-counted blocks, some registered under the digest of what they hold.

    A registered block that nobody holds any more stays findable until it is reused. Free blocks are reused in this
    order: those without a registration, then the registered ones, least recently used first.

    Attributes:
      num_blocks: Block ids are 0 to num_blocks - 1.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._ref_counts = [0] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._digest_of_block: list[bytes | None] = [None] * num_blocks
        self._block_of_digest: dict[bytes, int] = {}

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no request holds, registered ones included."""
        return len(self._free)

    def num_free_among(self, block_ids: Iterable[int]) -> int:
        """How many of these blocks nobody holds."""
        return sum(self._ref_counts[block_id] == 0 for block_id in block_ids)

    def find(self, digest: bytes) -> int | None:
        """The block registered under the digest."""
        return self._block_of_digest.get(digest)

    def hold(self, block_ids: Iterable[int]) -> None:
        """Counts one more reference to blocks that `find` gave."""
        for block_id in block_ids:
            if self._ref_counts[block_id] == 0:
                del self._free[block_id]
            self._ref_counts[block_id] += 1

    def take(self) -> int:
        """A free block, for new contents; raises KeyError if there is none."""
        block_id, _ = self._free.popitem(last=False)
        digest = self._digest_of_block[block_id]
        if digest is not None:
            del self._block_of_digest[digest]
            self._digest_of_block[block_id] = None
        self._ref_counts[block_id] = 1
        return block_id

    def give_back(self, block_ids: Iterable[int]) -> None:
        """Counts one reference less to each; of those that become free, the first is reused first."""
        for block_id in block_ids:
            self._ref_counts[block_id] -= 1
            if self._ref_counts[block_id] == 0:
                self._free[block_id] = None
                self._free.move_to_end(block_id, last=self._digest_of_block[block_id] is not None)

    def register(self, digest: bytes, block_id: int) -> None:
        """Makes a held block findable, unless an equal one is already."""
        if self._block_of_digest.setdefault(digest, block_id) == block_id:
            self._digest_of_block[block_id] = digest

    def unregister(self, digest: bytes) -> None:
        """Makes the block of this digest, if there is one, unfindable."""
        block_id = self._block_of_digest.pop(digest, None)
        if block_id is not None:
            self._digest_of_block[block_id] = None

    def unregister_all(self) -> None:
        self._block_of_digest.clear()
        self._digest_of_block = [None] * self.num_blocks
