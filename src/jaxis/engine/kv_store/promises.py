"""Bookkeeping of blocks for other engines: leases of blocks that are kept, and blocks that are still being computed."""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from jaxis.engine.kv_store.host_tier import BlockKey

# Most transfers that are remembered, ended ones included, so that an engine that asks late is answered at once.
MAX_TRANSFERS = 1 << 14


@dataclass(slots=True)
class _Lease:
    end: float
    num_holders: int = 0


class Leases:
    """Leases of blocks, all of the same length. Not safe for several threads.

    Args:
      seconds: Length of a lease from when it is granted or renewed.
      max_leases: Most leased blocks at a time.
    """

    def __init__(self, seconds: float, max_leases: int) -> None:
        self._seconds, self._max_leases = seconds, max_leases
        self._leases: OrderedDict[BlockKey, _Lease] = OrderedDict()  # sorted by their ends

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._leases

    def __len__(self) -> int:
        return len(self._leases)

    def grant(self, keys: Sequence[BlockKey]) -> bool:
        """Grants a lease of each of these blocks, present or not; returns False and grants none if they are too many.

        A block may be leased several times; each lease is given back by `release`.
        """
        if len(self._leases) + sum(key not in self._leases for key in keys) > self._max_leases:
            return False
        for key in keys:
            self._leases.setdefault(key, _Lease(0.0)).num_holders += 1
            self.renew(key)
        return True

    def renew(self, key: BlockKey) -> None:
        """Extends a lease, if there is one, to the length of a new one."""
        if (lease := self._leases.get(key)) is not None:
            lease.end = time.monotonic() + self._seconds
            self._leases.move_to_end(key)

    def release(self, keys: Iterable[BlockKey]) -> list[BlockKey]:
        """Gives back one lease of each of these blocks; returns the blocks with none left."""
        free = []
        for key in keys:
            if (lease := self._leases.get(key)) is not None:
                lease.num_holders -= 1
                if lease.num_holders == 0:
                    del self._leases[key]
                    free.append(key)
        return free

    def end(self, keys: Iterable[BlockKey]) -> None:
        for key in keys:
            self._leases.pop(key, None)

    def clear(self) -> None:
        self._leases.clear()

    def take_ended(self) -> list[BlockKey]:
        """Removes the leases that have expired, and returns their blocks."""
        ended, now = [], time.monotonic()
        while self._leases:
            key, lease = next(iter(self._leases.items()))
            if lease.end > now:
                break
            del self._leases[key]
            ended.append(key)
        return ended


class ExpectedBlocks:
    """Blocks that are being computed for other engines, and ids of these transfers. Not safe for several threads."""

    def __init__(self) -> None:
        self._counts: Counter[BlockKey] = Counter()
        self._transfers: OrderedDict[str, bool] = OrderedDict()  # True if the transfer has ended

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._counts

    def has_begun(self, transfer_id: str) -> bool:
        """Returns whether a prompt with this `transfer_id` was added."""
        return transfer_id in self._transfers

    def has_ended(self, transfer_id: str) -> bool:
        """Returns whether the other engine has received its blocks of that prompt, or wants no more."""
        return self._transfers.get(transfer_id, False)

    def end(self, transfer_id: str) -> None:
        """Marks a transfer as ended."""
        self._note(transfer_id, has_ended=True)

    def add(self, keys: Iterable[BlockKey], transfer_id: str | None) -> None:
        self._counts.update(keys)
        if transfer_id is not None and transfer_id not in self._transfers:
            self._note(transfer_id, has_ended=False)

    def remove(self, keys: Iterable[BlockKey]) -> None:
        for key in keys:
            self._counts[key] -= 1
            if self._counts[key] <= 0:
                del self._counts[key]

    def _note(self, transfer_id: str, *, has_ended: bool) -> None:
        self._transfers[transfer_id] = has_ended
        if len(self._transfers) > MAX_TRANSFERS:
            self._transfers.popitem(last=False)
