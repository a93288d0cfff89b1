"""The sequences that wait to be admitted, in the order in which they will be admitted."""

from __future__ import annotations

import heapq

from jaxis.engine.scheduling.sequence import Sequence


class WaitingQueue:
    """A priority queue by `Sequence.service_order`.

    Finished sequences are dropped when they come to the head: aborting one, or a hundred thousand, needs no search.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, int], int, Sequence]] = []
        self._num_pushes = 0

    def push(self, sequence: Sequence) -> None:
        """Queues a sequence."""
        # The count breaks ties, since sequences do not compare.
        self._num_pushes += 1
        heapq.heappush(self._heap, (sequence.service_order, self._num_pushes, sequence))

    def head(self) -> Sequence | None:
        """The next unfinished sequence, left in the queue; None if there is none."""
        while self._heap and self._heap[0][2].status.finished:
            heapq.heappop(self._heap)
        return self._heap[0][2] if self._heap else None

    def pop(self) -> Sequence:
        """Takes out the sequence that `head` just returned."""
        return heapq.heappop(self._heap)[2]
