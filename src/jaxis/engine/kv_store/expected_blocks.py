"""Which blocks are being computed for other engines."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable

from jaxis.engine.kv_store.host_tier import BlockKey

# Of prompts that have ended, too: who asks late finds their blocks, or learns at once that they are gone.
MAX_TRANSFERS = 1 << 14


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
        """Notes that."""
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
