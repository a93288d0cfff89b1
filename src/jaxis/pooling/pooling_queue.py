"""Queue of texts. Several clients share each step."""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np

from jaxis.engine.scheduling.fair_shares import FairShares
from jaxis.errors import EngineError


class QueuedRequest:
    """A request for the vectors or logits of texts.

    Attributes:
      vectors: float32 [texts, E] in bytes, little-endian, once the last one is computed.

    Args:
      texts: Token ids; each text has at least one.
      second_starts: Start of the second text of each pair; the number of tokens if the text is not a pair.
      client: Client of the request; clients share steps equally.
      priority: Priority of the request; lower values run first.
    """

    def __init__(
        self,
        texts: Sequence[Sequence[int]],
        second_starts: Sequence[int] = (),
        client: str | None = None,
        priority: int = 0,
    ) -> None:
        self.client, self.priority = client, priority
        self.vectors: Future[bytes] = Future()
        starts = second_starts or map(len, texts)
        self.texts = deque(
            QueuedText(self, index, ids, start) for index, (ids, start) in enumerate(zip(texts, starts, strict=True))
        )
        self._found: list[np.ndarray | None] = [None] * len(texts)
        self._num_left = len(texts)

    def put(self, index: int, vector: np.ndarray, *, is_finite: bool) -> None:
        """Notes the vector at an index. The last one completes the request, one that is not finite fails it."""
        if self.vectors.done():
            return
        self._found[index] = vector
        self._num_left -= 1
        if not is_finite:
            error = f"the output for text {index} is not finite: the model overflows, or its weights are broken"
            self.vectors.set_exception(EngineError(error))
        elif not self._num_left:
            self.vectors.set_result(np.stack([each for each in self._found if each is not None]).tobytes())


@dataclass(frozen=True)
class QueuedText:
    """A queued text of a request.

    Attributes:
      request: The request.
      index: Index of the text in the request.
      token_ids: Token ids, at least one.
      second_start: Start of the second text of a pair; the number of tokens if the text is not a pair.
    """

    request: QueuedRequest
    index: int
    token_ids: Sequence[int]
    second_start: int


@dataclass(order=True)
class _Waiting:
    """A request with texts left. The order of its fields is the order of service."""

    priority: int
    turn: int
    arrival: int
    request: QueuedRequest = field(compare=False)


class PoolingQueue:
    """Queue that hands out texts for steps.

    Clients take turns, counted in tokens (`FairShares`), so that a single query does not wait for a thousand documents
    of another client. The requests of one client are served in order of arrival. A request that has ended early is
    dropped.

    Attributes:
      num_texts: Number of waiting texts.
    """

    def __init__(self) -> None:
        self.num_texts = 0
        self._shares = FairShares()
        self._waiting: list[_Waiting] = []  # a heap; a turn may be older than its client's
        self._arrivals = itertools.count()

    def add(self, request: QueuedRequest) -> None:
        turn = self._shares.turn(request.client)
        heapq.heappush(self._waiting, _Waiting(request.priority, turn, next(self._arrivals), request))
        self.num_texts += len(request.texts)
        request.vectors.add_done_callback(lambda _: self._drop(request))

    def _drop(self, request: QueuedRequest) -> None:
        self.num_texts -= len(request.texts)
        request.texts.clear()

    def take(self, max_tokens: int, max_texts: int) -> list[QueuedText]:
        """Removes and returns the texts of the next step.

        Args:
          max_tokens: Limit of the tokens of a step; no text is longer.
          max_texts: Limit of the texts of a step.
        """
        taken: list[QueuedText] = []
        while self._waiting and len(taken) < max_texts:
            first, request = self._waiting[0], self._waiting[0].request
            turn = self._shares.turn(request.client)
            if not request.texts:
                heapq.heappop(self._waiting)
            elif turn > first.turn:
                first.turn = turn
                heapq.heapreplace(self._waiting, first)
            elif len(request.texts[0].token_ids) > max_tokens:
                break
            else:
                text = request.texts.popleft()
                self._shares.serve(request.client, len(text.token_ids))
                max_tokens -= len(text.token_ids)
                taken.append(text)
        self.num_texts -= len(taken)
        return taken
