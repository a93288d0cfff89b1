"""The requests that wait to be admitted, in the order they will be."""

from __future__ import annotations

import heapq

from jaxis.engine.scheduling.sequence import Request


class WaitingQueue:
    """A priority queue by `Request.service_order`.

    Finished requests are dropped when they come to the head: aborting one, or a hundred thousand, needs no search.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, int], int, Request]] = []
        self._num_pushes = 0

    def push(self, request: Request) -> None:
        """Queues a request."""
        # The count breaks ties, since requests do not compare.
        self._num_pushes += 1
        heapq.heappush(self._heap, (request.service_order, self._num_pushes, request))

    def head(self) -> Request | None:
        """The next unfinished request, left in the queue; None if there is none."""
        while self._heap and self._heap[0][2].status.finished:
            heapq.heappop(self._heap)
        return self._heap[0][2] if self._heap else None

    def pop(self) -> Request:
        """Takes out the request that `head` just returned."""
        return heapq.heappop(self._heap)[2]
