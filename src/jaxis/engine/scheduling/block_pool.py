"""A pool of KV cache blocks: who is free, who is held how often, and which known tokens a block holds."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

# Share of a pool that blocks behind a window may keep from others before they are reused first.
PASSED_SHARE = 0.25


class BlockPool:
    """Reference-counted blocks, some registered under the digest of what they hold.

    A registered block that nobody holds any more stays findable until it is reused. Free blocks are reused in this
    order: those without a registration, then the registered ones, least recently used first.

    Of the registered ones, those that a sequence passed (it goes on, but its window left them behind) come before those
    of ended sequences if they are more than a share of the pool: a single long prompt would else drive out the windows
    of all ended sequences, which those of a next turn find. Once found, a block no longer counts as passed. (This is
    the policy 2Q: Johnson and Shasha, VLDB 1994.)

    Attributes:
      num_blocks: Block ids are 0 to num_blocks - 1.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._max_passed = int(num_blocks * PASSED_SHARE)
        self._ref_counts = [0] * num_blocks
        self._was_found = [False] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._passed: OrderedDict[int, None] = OrderedDict()
        self._digest_of_block: list[bytes | None] = [None] * num_blocks
        self._block_of_digest: dict[bytes, int] = {}

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no request holds, registered ones included."""
        return len(self._free) + len(self._passed)

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
                del (self._passed if block_id in self._passed else self._free)[block_id]
            self._ref_counts[block_id] += 1
            self._was_found[block_id] = True

    def take(self) -> int:
        """A free block, for new contents; raises KeyError if there is none."""
        block_id, _ = (self._passed if self._passed_first() else self._free).popitem(last=False)
        digest = self._digest_of_block[block_id]
        if digest is not None:
            del self._block_of_digest[digest]
            self._digest_of_block[block_id] = None
        self._ref_counts[block_id] = 1
        self._was_found[block_id] = False
        return block_id

    def give_back(self, block_ids: Iterable[int], *, passed: bool = False) -> None:
        """Counts one reference less to each; of those that become free, the first is reused first.

        Args:
          block_ids: Held blocks.
          passed: Whether the sequence that gives them back goes on behind them.
        """
        for block_id in block_ids:
            self._ref_counts[block_id] -= 1
            if self._ref_counts[block_id] == 0:
                is_registered = self._digest_of_block[block_id] is not None
                if passed and is_registered and not self._was_found[block_id]:
                    self._passed[block_id] = None
                else:
                    self._free[block_id] = None
                    self._free.move_to_end(block_id, last=is_registered)

    def _passed_first(self) -> bool:
        """Whether the next block to reuse is one that a sequence passed."""
        if not self._passed or not self._free:
            return bool(self._passed)
        is_next_registered = self._digest_of_block[next(iter(self._free))] is not None
        return is_next_registered and len(self._passed) > self._max_passed

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
