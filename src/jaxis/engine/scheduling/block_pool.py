"""A pool of KV cache blocks: which are free, how often each is referenced, and which known tokens each holds."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from jaxis.engine.scheduling.block_connector import NO_CONNECTOR, BlockConnector

# Out-of-window blocks are reused first once they make up more than this share of a pool.
OUT_OF_WINDOW_SHARE = 0.25


class BlockPool:
    """Reference-counted blocks, some registered under the digest of their contents.

    A registered block stays findable after its last reference is dropped, until it is reused. Free blocks are reused in
    this order: unregistered ones, then registered ones, least recently used first.

    A registered block is out of window when the sequence that computed it still runs, but the sequence's window has
    moved past the block. Once such blocks exceed a share of the pool, they are reused before the blocks of ended
    sequences. Otherwise a single long prompt would evict the windows of all ended conversations, whose next turn would
    have found them. A block that was found again no longer counts as out of window. (This is the 2Q policy: Johnson and
    Shasha, VLDB 1994.)

    Args:
      num_blocks: Number of blocks; their ids are 0 to num_blocks - 1.
      group: Number by which the connector knows the pool.
      connector: Connector that is told which blocks are registered.
    """

    def __init__(self, num_blocks: int, group: int = 0, connector: BlockConnector = NO_CONNECTOR) -> None:
        self.num_blocks = num_blocks
        self._group, self._connector = group, connector
        self._max_out_of_window = int(num_blocks * OUT_OF_WINDOW_SHARE)
        self._ref_counts = [0] * num_blocks
        self._was_found = [False] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._out_of_window: OrderedDict[int, None] = OrderedDict()
        self._digest_of_block: list[bytes | None] = [None] * num_blocks
        self._block_of_digest: dict[bytes, int] = {}

    @property
    def num_free_blocks(self) -> int:
        """The number of blocks that no sequence holds, registered ones included."""
        return len(self._free) + len(self._out_of_window)

    def num_free_among(self, block_ids: Iterable[int]) -> int:
        return sum(self._ref_counts[block_id] == 0 for block_id in block_ids)

    def find(self, digest: bytes) -> int | None:
        """Returns the block registered under the digest; None if there is none."""
        return self._block_of_digest.get(digest)

    def hold(self, block_ids: Iterable[int]) -> None:
        """Adds a reference to blocks that `find` returned."""
        for block_id in block_ids:
            if self._ref_counts[block_id] == 0:
                del (self._out_of_window if block_id in self._out_of_window else self._free)[block_id]
            self._ref_counts[block_id] += 1
            self._was_found[block_id] = True

    def take(self) -> int:
        """Returns a free block for new contents; raises KeyError if there is none."""
        block_id, _ = (self._out_of_window if self._out_of_window_first() else self._free).popitem(last=False)
        digest = self._digest_of_block[block_id]
        if digest is not None:
            del self._block_of_digest[digest]
            self._digest_of_block[block_id] = None
            self._connector.unregistered(self._group, digest, block_id, evicted=True)
        self._ref_counts[block_id] = 1
        self._was_found[block_id] = False
        return block_id

    def give_back(self, block_ids: Iterable[int], *, out_of_window: bool = False) -> None:
        """Drops one reference to each block. Of the blocks that become free, the first is reused first.

        Blocks are `out_of_window` if their sequence still runs and only its window has moved past them.
        """
        for block_id in block_ids:
            self._ref_counts[block_id] -= 1
            if self._ref_counts[block_id] == 0:
                is_registered = self._digest_of_block[block_id] is not None
                if out_of_window and is_registered and not self._was_found[block_id]:
                    self._out_of_window[block_id] = None
                else:
                    self._free[block_id] = None
                    self._free.move_to_end(block_id, last=is_registered)

    def _out_of_window_first(self) -> bool:
        """Returns whether the next block to reuse is an out-of-window one."""
        if not self._out_of_window or not self._free:
            return bool(self._out_of_window)
        is_next_registered = self._digest_of_block[next(iter(self._free))] is not None
        return is_next_registered and len(self._out_of_window) > self._max_out_of_window

    def register(self, digest: bytes, block_id: int) -> None:
        """Makes a held block findable, unless an equal block is findable already."""
        if self._block_of_digest.setdefault(digest, block_id) == block_id:
            self._digest_of_block[block_id] = digest
            self._connector.registered(self._group, digest, block_id)

    def registered_blocks(self) -> list[tuple[bytes, int]]:
        return list(self._block_of_digest.items())

    def unregister_all(self) -> None:
        """Makes every block unfindable; held ones stay held."""
        for digest in list(self._block_of_digest):
            self.unregister(digest)

    def unregister(self, digest: bytes) -> None:
        """Makes the block of this digest, if any, unfindable. If it is free, it is reused first."""
        block_id = self._block_of_digest.pop(digest, None)
        if block_id is not None:
            self._digest_of_block[block_id] = None
            if block_id in self._free:
                self._free.move_to_end(block_id, last=False)
            self._connector.unregistered(self._group, digest, block_id, evicted=False)
