"""Which blocks are kept for another engine, and until when."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence

from jaxis.engine.kv_store.host_tier import BlockKey


class Leases:
    """Blocks with an end of their lease, all leases being of one length. Not safe for several threads.

    Args:
      seconds: From when a lease was granted, or last renewed.
      max_leases: At once.
    """

    def __init__(self, seconds: float, max_leases: int) -> None:
        self._seconds, self._max_leases = seconds, max_leases
        self._ends: OrderedDict[BlockKey, float] = OrderedDict()  # the first one ends first

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._ends

    def __len__(self) -> int:
        return len(self._ends)

    def grant(self, keys: Sequence[BlockKey]) -> bool:
        """Grants leases of all of these blocks, whether they are there or not; False: they would be too many."""
        if len(self._ends) + sum(key not in self._ends for key in keys) > self._max_leases:
            return False
        end = time.monotonic() + self._seconds
        for key in keys:
            self._ends[key] = end
            self._ends.move_to_end(key)
        return True

    def renew(self, key: BlockKey) -> None:
        """Makes a lease, if there is one, as long as a new one."""
        if key in self._ends:
            self.grant([key])

    def end(self, keys: Iterable[BlockKey]) -> None:
        """Ends the leases of these blocks."""
        for key in keys:
            self._ends.pop(key, None)

    def take_ended(self) -> list[BlockKey]:
        """Removes, and returns, the leases that are over."""
        ended, now = [], time.monotonic()
        while self._ends:
            key, end = next(iter(self._ends.items()))
            if end > now:
                break
            del self._ends[key]
            ended.append(key)
        return ended
