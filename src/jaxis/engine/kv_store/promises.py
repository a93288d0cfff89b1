"""Blocks for other engines: which are being computed for them, and which are kept, and until when."""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from jaxis.engine.kv_store.host_tier import BlockKey

# How many are remembered, ended ones included: an engine that asks late is answered at once, with blocks or without.
MAX_TRANSFERS = 1 << 14


@dataclass(slots=True)
class _Lease:
    end: float
    num_holders: int = 0


class Leases:
    """Blocks with an end of their lease, all leases being of one length. Not safe for several threads.

    Args:
      seconds: From when a lease was granted, or last renewed.
      max_leases: At once.
    """

    def __init__(self, seconds: float, max_leases: int) -> None:
        self._seconds, self._max_leases = seconds, max_leases
        self._leases: OrderedDict[BlockKey, _Lease] = OrderedDict()  # the first one ends first

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._leases

    def __len__(self) -> int:
        return len(self._leases)

    def grant(self, keys: Sequence[BlockKey]) -> bool:
        """Grants leases of all of these blocks, whether they are there or not; False: they would be too many.

        A block may be leased several times; see `release`.
        """
        if len(self._leases) + sum(key not in self._leases for key in keys) > self._max_leases:
            return False
        for key in keys:
            self._leases.setdefault(key, _Lease(0.0)).num_holders += 1
            self.renew(key)
        return True

    def renew(self, key: BlockKey) -> None:
        """Makes a lease, if there is one, as long as a new one."""
        if (lease := self._leases.get(key)) is not None:
            lease.end = time.monotonic() + self._seconds
            self._leases.move_to_end(key)

    def release(self, keys: Iterable[BlockKey]) -> list[BlockKey]:
        """Gives back one lease of each of these blocks; returns those with none left."""
        free = []
        for key in keys:
            if (lease := self._leases.get(key)) is not None:
                lease.num_holders -= 1
                if lease.num_holders == 0:
                    del self._leases[key]
                    free.append(key)
        return free

    def end(self, keys: Iterable[BlockKey]) -> None:
        """Ends all leases of these blocks."""
        for key in keys:
            self._leases.pop(key, None)

    def clear(self) -> None:
        """Ends all leases."""
        self._leases.clear()

    def take_ended(self) -> list[BlockKey]:
        """Removes, and returns, the leases that are over."""
        ended, now = [], time.monotonic()
        while self._leases:
            key, lease = next(iter(self._leases.items()))
            if lease.end > now:
                break
            del self._leases[key]
            ended.append(key)
        return ended


class ExpectedBlocks:
    """The blocks of prompts that are being computed, and the names of those transfers. Not safe for several threads."""

    def __init__(self) -> None:
        self._counts: Counter[BlockKey] = Counter()
        self._transfers: OrderedDict[str, bool] = OrderedDict()  # whether each has ended

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._counts

    def has_begun(self, transfer_id: str) -> bool:
        """Whether a prompt with this `transfer_id` was added."""
        return transfer_id in self._transfers

    def has_ended(self, transfer_id: str) -> bool:
        """Whether the other engine has got what it wanted of that prompt, or wants no more of it."""
        return self._transfers.get(transfer_id, False)

    def end(self, transfer_id: str) -> None:
        """Notes that a transfer has ended; see `has_ended`."""
        self._note(transfer_id, has_ended=True)

    def add(self, keys: Iterable[BlockKey], transfer_id: str | None) -> None:
        """Adds the blocks of a prompt, and its `transfer_id`, if it has one."""
        self._counts.update(keys)
        if transfer_id is not None and transfer_id not in self._transfers:
            self._note(transfer_id, has_ended=False)

    def remove(self, keys: Iterable[BlockKey]) -> None:
        """Removes the blocks of a prompt that were added."""
        for key in keys:
            self._counts[key] -= 1
            if self._counts[key] <= 0:
                del self._counts[key]

    def _note(self, transfer_id: str, *, has_ended: bool) -> None:
        self._transfers[transfer_id] = has_ended
        if len(self._transfers) > MAX_TRANSFERS:
            self._transfers.popitem(last=False)
