"""Queue of texts. Several clients share each step."""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from dataclasses import dataclass, field

from jaxis.engine.scheduling.fair_shares import FairShares
from jaxis.pooling.client.wire import PoolTexts


@dataclass(frozen=True)
class QueuedText:
    """A queued text of a request.

    Attributes:
      request_id: Id of the request.
      index: Index of the text in the request.
      token_ids: Token ids, at least one.
      second_start: Start of the second text of a pair; the number of tokens if the text is not a pair.
    """

    request_id: str
    index: int
    token_ids: list[int]
    second_start: int


@dataclass(order=True)
class _Waiting:
    """A request with texts left. The order of its fields is the order of service."""

    priority: int
    turn: int
    arrival: int
    client: str | None = field(compare=False)
    texts: deque[QueuedText] = field(compare=False)


class PoolingQueue:
    """Queue that hands out texts for steps.

    Clients take turns, counted in tokens (`FairShares`), so that a single query does not wait for a thousand documents
    of
    another client. The requests of one client are served in order of arrival.

    Attributes:
      num_texts: Number of waiting texts.
    """

    def __init__(self) -> None:
        self.num_texts = 0
        self._shares = FairShares()
        self._waiting: list[_Waiting] = []  # a heap; a turn may be older than its client's
        self._by_id: dict[str, _Waiting] = {}
        self._arrivals = itertools.count()

    def add(self, request: PoolTexts) -> None:
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
        """Drops the remaining texts of a request."""
        if (waiting := self._by_id.pop(request_id, None)) is not None:
            self.num_texts -= len(waiting.texts)
            waiting.texts.clear()

    def take(self, max_tokens: int, max_texts: int) -> list[QueuedText]:
        """Removes and returns the texts of the next step.

        Args:
          max_tokens: Limit of the tokens of a step; no text is longer.
          max_texts: Limit of the texts of a step.
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
