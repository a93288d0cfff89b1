"""The store of blocks by digest: host memory, and the disk as a second tier.

Other engines fetch blocks from memory (`peers`), and blocks of other engines are put there (`peer_client`).
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from jaxis.engine.kv_connector import TierStats
from jaxis.engine.kv_store.disk_tier import DiskTier
from jaxis.engine.kv_store.host_tier import BlockKey, HostTier
from jaxis.engine.kv_store.promises import ExpectedBlocks, Leases
from jaxis.host.threads import Deadline

LEASE_SECONDS = 60.0


class KVStore:
    """The `BlockStore` of blocks that the devices no longer hold, or may drop.

    All methods may be called by any thread. Blocks on disk are only found once `fetch` has read them.

    Attributes:
      saves_registered: True if there is a disk. Blocks then go to disk as soon as they are computed, since a process
        may end without notice.
      epoch: Number of removals of blocks so far.

    Args:
      max_host_bytes: Largest size of the blocks in memory.
      block_bytes: Size of a block of each group.
      disk: Disk tier to which blocks are written, too; None: there is none.
      lease_seconds: Time for which blocks are kept that were promised to another engine or fetched for a prompt.
    """

    def __init__(
        self,
        max_host_bytes: int,
        block_bytes: Sequence[int],
        disk: DiskTier | None = None,
        *,
        lease_seconds: float = LEASE_SECONDS,
    ) -> None:
        self.saves_registered = disk is not None
        self._host = HostTier(max_host_bytes)
        self.block_bytes = tuple(block_bytes)
        self._disk = disk
        self._lock = threading.Lock()
        self._arrived = threading.Condition(self._lock)
        self._leases = Leases(lease_seconds, max(1, max_host_bytes // min(block_bytes)))
        self._awaited: set[BlockKey] = set()
        self._expected = ExpectedBlocks()
        self._host_stats = TierStats()
        self.epoch = 0

    @property
    def stats(self) -> Mapping[str, TierStats]:
        """The counters of each tier, by its name."""
        with self._lock:
            stats = {"host": dataclasses.replace(self._host_stats, used_bytes=self._host.num_bytes)}
        return stats if self._disk is None else stats | {"disk": self._disk.stats}

    @property
    def has_disk(self) -> bool:
        return self._disk is not None

    @property
    def max_host_blocks(self) -> int:
        """Length of the longest prefix that fits into memory, in blocks of all groups."""
        return self._host.max_bytes // sum(self.block_bytes)

    def has(self, group: int, digest: bytes) -> bool:
        return (group, digest) in self._host

    def find(self, group: int, digest: bytes) -> np.ndarray | None:
        with self._lock:
            return self._host.find((group, digest))

    def note_admitted(self, loaded: Iterable[BlockKey], num_missing: int) -> None:
        keys = list(loaded)
        with self._lock:
            self._leases.end(keys)
            self._unpin(keys)
            # The first blocks become the newest: later ones are useless without them.
            self._host.touch(reversed(keys))
            self._host_stats.loaded_blocks += len(keys)
            self._host_stats.loaded_bytes += sum(self.block_bytes[group] for group, _ in keys)
            self._host_stats.missed_blocks += num_missing

    def put(self, key: BlockKey, block: np.ndarray, epoch: int) -> None:
        """Adds a computed block, unless blocks were removed since it was computed: it may have been one of them.

        Args:
          key: Key of the block.
          block: uint8 [N], memory of its own that nobody writes to from now on.
          epoch: Value of `epoch` when the block was computed.
        """
        with self._lock:
            self._awaited.discard(key)
            if epoch == self.epoch:
                self._free_ended()
                if self._host.put(key, block, pinned=self._is_kept(key)):
                    self._host_stats.saved_blocks += 1
                    self._host_stats.saved_bytes += block.nbytes
                else:
                    self._host_stats.failed_blocks += 1
            self._arrived.notify_all()
            if epoch != self.epoch:
                return
        if self._disk is not None:
            self._disk.write(key, block)

    def note_failed(self, keys: Sequence[BlockKey]) -> None:
        """Counts blocks that could not be copied off the devices."""
        with self._lock:
            self._host_stats.failed_blocks += len(keys)
            self._awaited.difference_update(keys)
            self._arrived.notify_all()

    @property
    def is_awaited(self) -> bool:
        """True if promised blocks are still on their way here."""
        return bool(self._awaited)

    def promise(self, keys: Sequence[BlockKey], transfer_id: str | None = None) -> bool:
        """Keeps blocks, here or on their way, until their lease ends; returns False if there are too many leases.

        Args:
          keys: Keys of a prompt's blocks.
          transfer_id: Id of the transfer, as in `expect`. If it has ended, no engine will ask for the blocks, and they
            are not kept.
        """
        with self._lock:
            if transfer_id is not None and self._expected.has_ended(transfer_id):
                return True
            self._free_ended()
            if not self._leases.grant(keys):
                return False
            for key in keys:
                self._host.pin(key)
                if key not in self._host:
                    self._awaited.add(key)
            return True

    def forget_promises(self) -> None:
        """Ends all waits for blocks on their way, which were lost."""
        with self._lock:
            self._awaited.clear()
            self._arrived.notify_all()

    def expect(self, keys: Sequence[BlockKey], transfer_id: str | None = None) -> None:
        """Marks blocks as being computed for another engine, until `end_expecting` is called with them.

        Until then, those in memory are pinned.

        Args:
          keys: Keys of the prompt's blocks.
          transfer_id: Name by which the other engine may have asked for the blocks already; None if it asks later.
        """
        with self._lock:
            self._expected.add(keys, transfer_id)
            for key in keys:
                self._host.pin(key)
            self._arrived.notify_all()

    def end_expecting(self, keys: Sequence[BlockKey]) -> None:
        """Marks blocks as computed, or given up."""
        with self._lock:
            self._expected.remove(keys)
            self._unpin(keys)
            self._arrived.notify_all()

    def wait_for_transfer(self, transfer_id: str, seconds: float) -> bool:
        """Waits for a prompt with this `transfer_id`; returns whether one was expected within so many seconds."""
        with self._lock:
            return self._arrived.wait_for(lambda: self._expected.has_begun(transfer_id), seconds)

    def is_coming(self, key: BlockKey) -> bool:
        """Returns whether a block is not here, but promised or being computed for another engine."""
        with self._lock:
            return self._is_coming(key)

    def wait_for(self, key: BlockKey, seconds: float) -> bool:
        """Waits for a block while it is coming, for at most so many seconds; returns whether it is still coming."""
        with self._lock:
            return not self._arrived.wait_for(lambda: not self._is_coming(key), seconds)

    def _is_coming(self, key: BlockKey) -> bool:
        return (key in self._awaited or key in self._expected) and key not in self._host

    def read_promised(self, key: BlockKey) -> np.ndarray | None:
        """Returns a block for another engine, and renews its lease; None if it is not here."""
        with self._lock:
            self._leases.renew(key)
            return self._host.find(key)

    def release(self, keys: Iterable[BlockKey], transfer_id: str | None = None) -> None:
        """Gives back leases of blocks that another engine no longer wants. Blocks without another lease are unpinned.

        Args:
          keys: Keys of a prompt's blocks.
          transfer_id: Id of the transfer, as in `expect`, which ends.
        """
        with self._lock:
            if transfer_id is not None:
                self._expected.end(transfer_id)
            self._unpin(self._leases.release(keys))

    def put_fetched(self, key: BlockKey, block: np.ndarray, epoch: int) -> bool:
        """Adds a block of another engine, with a lease, for a prompt that will be added soon.

        Args:
          key: Key of the block.
          block: uint8 [N], memory of its own that nobody writes to from now on.
          epoch: Value of `epoch` when the transfer began.

        Returns:
          True if the block was added; False if it does not fit, or blocks were removed since.
        """
        with self._lock:
            if epoch != self.epoch:
                return False
            self._free_ended()
            return self._host.put(key, block, pinned=self._leases.grant([key]))

    def on_disk(self, key: BlockKey) -> bool:
        """Returns whether there is a file for a block; it may turn out to be damaged."""
        return self._disk is not None and self._disk.has(key)

    def fetch(self, keys: Iterable[BlockKey], deadline: Deadline) -> None:
        """Reads blocks from disk into memory, one by one, until the deadline."""
        if self._disk is None:
            return
        epoch, keys = self.epoch, list(keys)
        for key in keys:
            if not deadline.left:
                return
            block = self._disk.read(key, self.block_bytes[key[0]])
            with self._lock:
                if epoch != self.epoch:
                    return
                if block is not None:
                    self._host.put(key, block)
        with self._lock:
            self._host.touch(reversed(keys))

    def note_used(self, keys: Iterable[BlockKey]) -> None:
        """Records that a prompt began with these blocks, in order, in whichever tier they were found."""
        if self._disk is not None:
            self._disk.touch(reversed(list(keys)))

    def remove(self, digests: Iterable[bytes]) -> None:
        keys = [(group, digest) for digest in digests for group in range(len(self.block_bytes))]
        with self._lock:
            self.epoch += 1
            self._leases.end(keys)
            self._awaited.difference_update(keys)
            self._arrived.notify_all()
            for key in keys:
                self._host.remove(key)
        if self._disk is not None:
            self._disk.remove(keys)

    def clear(self) -> None:
        with self._lock:
            self.epoch += 1
            self._leases.clear()
            self._awaited.clear()
            self._arrived.notify_all()
            self._host.clear()
        if self._disk is not None:
            self._disk.clear()

    def close(self) -> None:
        """Waits a limited time until all added blocks are on disk."""
        if self._disk is not None:
            self._disk.close()
        self._host.clear()

    def _free_ended(self) -> None:
        ended = self._leases.take_ended()
        self._unpin(ended)
        self._awaited.difference_update(ended)

    def _is_kept(self, key: BlockKey) -> bool:
        return key in self._leases or key in self._expected

    def _unpin(self, keys: Iterable[BlockKey]) -> None:
        for key in keys:
            if not self._is_kept(key):
                self._host.unpin(key)
