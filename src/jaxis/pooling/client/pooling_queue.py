"""Which texts are computed next: those of several clients share each step."""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from dataclasses import dataclass, field

from jaxis.engine.scheduling.fair_shares import FairShares
from jaxis.pooling.client.wire import PoolTexts


@dataclass(frozen=True)
class QueuedText:
    """One of a request's texts.

    Attributes:
      request_id: The request's.
      index: Which of its texts.
      token_ids: At least one.
      second_start: Where the second text begins, if it is a pair; else the number of tokens.
    """

    request_id: str
    index: int
    token_ids: list[int]
    second_start: int


@dataclass(order=True)
class _Waiting:
    """A request that has texts left; in the order in which requests are served."""

    priority: int
    turn: int
    arrival: int
    client: str | None = field(compare=False)
    texts: deque[QueuedText] = field(compare=False)


class PoolingQueue:
    """Holds texts, and hands them out for steps.

    Clients take turns, counted in tokens (`FairShares`), so that a single query does not wait for all of a client's
    thousand documents; a client's own requests are served in the order in which they came.

    Attributes:
      num_texts: Texts that wait.
    """

    def __init__(self) -> None:
        self.num_texts = 0
        self._shares = FairShares()
        self._waiting: list[_Waiting] = []  # a heap; a turn may be older than its client's
        self._by_id: dict[str, _Waiting] = {}
        self._arrivals = itertools.count()

    def add(self, request: PoolTexts) -> None:
        """Queues a request's texts."""
        starts = request.second_starts or map(len, request.texts)
        texts = deque(
            QueuedText(request.request_id, index, ids, start)
            for index, (ids, start) in enumerate(zip(request.texts, starts, strict=True))
        )
        turn = self._shares.turn(request.client)
        waiting = _Waiting(request.priority, turn, next(self._arrivals), request.client, texts)
        self._by_id[request.request_id] = waiting
        heapq.heappush(self._waiting, waiting)
        self.num_texts += len(texts)

    def remove(self, request_id: str) -> None:
        """Drops what is left of a request."""
        if (waiting := self._by_id.pop(request_id, None)) is not None:
            self.num_texts -= len(waiting.texts)
            waiting.texts.clear()

    def take(self, max_tokens: int, max_texts: int) -> list[QueuedText]:
        """The texts of the next step, which are gone from here.

        Args:
          max_tokens: Most of all together; no text has more.
          max_texts: Most texts.
        """
        taken: list[QueuedText] = []
        while self._waiting and len(taken) < max_texts:
            first = self._waiting[0]
            turn = self._shares.turn(first.client)
            if not first.texts:
                heapq.heappop(self._waiting)
            elif turn > first.turn:
                first.turn = turn
                heapq.heapreplace(self._waiting, first)
            elif len(first.texts[0].token_ids) > max_tokens:
                break
            else:
                text = first.texts.popleft()
                self._shares.serve(first.client, len(text.token_ids))
                max_tokens -= len(text.token_ids)
                taken.append(text)
                if not first.texts:
                    del self._by_id[text.request_id]
        self.num_texts -= len(taken)
        return taken
