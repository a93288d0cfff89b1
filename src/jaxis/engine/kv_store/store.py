"""The store of blocks by digest: the host's memory, and below it the disk.

Other engines get blocks from memory (`peers`), and blocks of theirs are put there (`peer_client`).
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
    """Blocks that the engine's devices no longer hold, or may lose; a `BlockStore`.

    All methods may be called by any thread. What is on disk is only found once `fetch` has read it.

    Attributes:
      saves_registered: A block goes to disk as soon as it is computed: a process may end without notice.
      epoch: How often blocks were removed.
      block_bytes: Bytes of a block of each group.

    Args:
      max_host_bytes: Of the blocks in memory.
      block_bytes: Bytes of a block of each group.
      disk: Where they are written too; None: nowhere.
      lease_seconds: How long blocks stay for those that were promised them, or that are about to use them.
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
        """Whether there is anything to `fetch` from."""
        return self._disk is not None

    @property
    def max_host_blocks(self) -> int:
        """The longest prefix that fits into memory, in blocks of all groups."""
        return self._host.max_bytes // sum(self.block_bytes)

    def has(self, group: int, digest: bytes) -> bool:
        """See `BlockStore.has`."""
        return (group, digest) in self._host

    def find(self, group: int, digest: bytes) -> np.ndarray | None:
        """See `BlockStore.find`."""
        with self._lock:
            return self._host.find((group, digest))

    def note_admitted(self, loaded: Iterable[BlockKey], num_missing: int) -> None:
        """See `BlockStore.note_admitted`."""
        keys = list(loaded)
        with self._lock:
            self._leases.end(keys)
            self._unpin(keys)
            # The first blocks last: those after them are of no use without them.
            self._host.touch(reversed(keys))
            self._host_stats.loaded_blocks += len(keys)
            self._host_stats.loaded_bytes += sum(self.block_bytes[group] for group, _ in keys)
            self._host_stats.missed_blocks += num_missing

    def put(self, key: BlockKey, block: np.ndarray, epoch: int) -> None:
        """Adds a block that was computed, unless blocks were removed meanwhile: it may have been one of them.

        Args:
          key: What it is found by.
          block: uint8 [N], memory of its own that nobody writes to from now on.
          epoch: `epoch` when it was computed.
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
        """Whether blocks were promised that are still on their way here."""
        return bool(self._awaited)

    def promise(self, keys: Sequence[BlockKey], transfer_id: str | None = None) -> bool:
        """Keeps blocks, which are here or on their way, until their lease is over; False: there is no room for more.

        Args:
          keys: Of a prompt's blocks.
          transfer_id: See `expect`. If that transfer has ended, no engine will ask for the blocks: they are not kept.
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
        """Nobody is to wait for what is on its way: it was lost."""
        with self._lock:
            self._awaited.clear()
            self._arrived.notify_all()

    def expect(self, keys: Sequence[BlockKey], transfer_id: str | None = None) -> None:
        """Notes that blocks for another engine are being computed, until `end_expecting` is called with them.

        Meanwhile, those that are here do not make room for others.

        Args:
          keys: Of the prompt's blocks.
          transfer_id: The name by which the other engine may ask for them before they were noted.
        """
        with self._lock:
            self._expected.add(keys, transfer_id)
            for key in keys:
                self._host.pin(key)
            self._arrived.notify_all()

    def end_expecting(self, keys: Sequence[BlockKey]) -> None:
        """Notes that blocks were computed, or will not be."""
        with self._lock:
            self._expected.remove(keys)
            self._unpin(keys)
            self._arrived.notify_all()

    def wait_for_transfer(self, transfer_id: str, seconds: float) -> bool:
        """Waits, at most so long, until a prompt with this `transfer_id` is expected, or was; returns whether it is."""
        with self._lock:
            return self._arrived.wait_for(lambda: self._expected.has_begun(transfer_id), seconds)

    def is_coming(self, key: BlockKey) -> bool:
        """Whether a block is not here, but promised, or being computed for another engine."""
        with self._lock:
            return self._is_coming(key)

    def wait_for(self, key: BlockKey, seconds: float) -> bool:
        """Waits for a block while it is coming, at most so long; returns whether it is still coming."""
        with self._lock:
            return not self._arrived.wait_for(lambda: not self._is_coming(key), seconds)

    def _is_coming(self, key: BlockKey) -> bool:
        return (key in self._awaited or key in self._expected) and key not in self._host

    def read_promised(self, key: BlockKey) -> np.ndarray | None:
        """A block for another engine, whose lease begins anew; None if it is not here."""
        with self._lock:
            self._leases.renew(key)
            return self._host.find(key)

    def release(self, keys: Iterable[BlockKey], transfer_id: str | None = None) -> None:
        """Another engine wants no more of these blocks: they make room for others, unless promised once more.

        Args:
          keys: Of a prompt's blocks.
          transfer_id: See `expect`; this ends it.
        """
        with self._lock:
            if transfer_id is not None:
                self._expected.end(transfer_id)
            self._unpin(self._leases.release(keys))

    def put_fetched(self, key: BlockKey, block: np.ndarray, epoch: int) -> bool:
        """Adds a block of another engine for a prompt that is about to be added; False: there is no room.

        The arguments are those of `put`.
        """
        with self._lock:
            if epoch != self.epoch:
                return False
            self._free_ended()
            return self._host.put(key, block, pinned=self._leases.grant([key]))

    def on_disk(self, key: BlockKey) -> bool:
        """Whether there is a file for a block; it may turn out to be damaged."""
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
        """Notes that a prompt began with these blocks, the first one first, wherever they were found."""
        if self._disk is not None:
            self._disk.touch(reversed(list(keys)))

    def remove(self, digests: Iterable[bytes]) -> None:
        """See `BlockStore.remove`."""
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
        """See `BlockStore.clear`."""
        with self._lock:
            self.epoch += 1
            self._leases.clear()
            self._awaited.clear()
            self._arrived.notify_all()
            self._host.clear()
        if self._disk is not None:
            self._disk.clear()

    def close(self) -> None:
        """Waits until what was added is on disk, for a while."""
        if self._disk is not None:
            self._disk.close()
        self._host.clear()

    def _free_ended(self) -> None:
        """Lets blocks whose lease is over make room for others."""
        ended = self._leases.take_ended()
        self._unpin(ended)
        self._awaited.difference_update(ended)

    def _is_kept(self, key: BlockKey) -> bool:
        return key in self._leases or key in self._expected

    def _unpin(self, keys: Iterable[BlockKey]) -> None:
        for key in keys:
            if not self._is_kept(key):
                self._host.unpin(key)
