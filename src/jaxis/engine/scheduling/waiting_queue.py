"""The queue of sequences that wait to be admitted, in the order of their admission."""

from __future__ import annotations

import heapq

from jaxis.engine.scheduling.fair_shares import FairShares
from jaxis.engine.scheduling.sequence import Sequence


class WaitingQueue:
    """Orders sequences by priority, then by the turn of their client in `shares`, then by arrival.

    Finished sequences are dropped when they come to the head, so aborting many sequences needs no search.
    """

    def __init__(self, shares: FairShares) -> None:
        self._shares = shares
        # Two heaps a client: sequences that need no place, and those that need one. The turns of clients change with
        # every step, the order within a heap never.
        self._heaps: dict[tuple[str | None, bool], list[tuple[tuple[int, int], int, Sequence]]] = {}
        self._num_pushes = 0

    def push(self, sequence: Sequence) -> None:
        # The count breaks ties, since sequences do not compare.
        self._num_pushes += 1
        heap = self._heaps.setdefault(_key(sequence), [])
        heapq.heappush(heap, (sequence.service_order, self._num_pushes, sequence))

    def head(self, *, without_place: bool = False) -> Sequence | None:
        """Returns the next unfinished sequence, which stays in the queue; None if there is none.

        `without_place` skips sequences that need a place.
        """
        keys = [key for key in self._heaps if not (without_place and key[1])]
        heads = [sequence for key in keys if (sequence := self._head_of(key)) is not None]
        return min(heads, key=self.order, default=None)

    def pop(self, sequence: Sequence) -> None:
        """Removes the sequence that `head` just returned."""
        heapq.heappop(self._heaps[_key(sequence)])

    def order(self, sequence: Sequence) -> tuple[int, int, int]:
        """Returns a sort key for sequences, running ones as well; the smallest is served first."""
        priority, arrival = sequence.service_order
        return priority, self._shares.turn(sequence.client), arrival

    def _head_of(self, key: tuple[str | None, bool]) -> Sequence | None:
        heap = self._heaps[key]
        while heap and heap[0][2].status.finished:
            heapq.heappop(heap)
        if not heap:
            del self._heaps[key]
            return None
        return heap[0][2]


def _key(sequence: Sequence) -> tuple[str | None, bool]:
    return sequence.client, bool(sequence.place)
