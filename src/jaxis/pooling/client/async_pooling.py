"""Asynchronous engine for embeddings: coroutines wait for the vectors of their texts."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np

from jaxis.engine.client.async_engine import AsyncEngine
from jaxis.errors import DeadlineExceededError
from jaxis.pooling.client.pooling_process import PoolingClient
from jaxis.pooling.client.wire import PoolingOutputs, PoolTexts

MAX_TEXTS = 2048  # in a request: OpenAI's limit


class _Waiting:
    """A request's vectors while they arrive."""

    def __init__(self, num_texts: int, size: int, future: asyncio.Future[np.ndarray]) -> None:
        self.vectors = np.zeros((num_texts, size), np.float32)
        self.num_left = num_texts
        self.future = future

    def fail(self, error: Exception) -> None:
        if not self.future.done():
            self.future.set_exception(error)


class AsyncPoolingEngine(AsyncEngine):
    """Computes vectors or logits for coroutines; see `AsyncEngine`.

    Args:
      engine: Client of the model's process.
      max_queued: Limit of waiting texts beyond those of one request.
      stall_seconds: Time without progress that counts as a stall; see `AsyncEngine`.

    Attributes:
      pooling_info: Facts about the model.
    """

    unit = "texts"
    advice = "send fewer texts at a time"

    def __init__(self, engine: PoolingClient, *, max_queued: int, stall_seconds: float) -> None:
        super().__init__(engine, max_sequences=MAX_TEXTS + max_queued, stall_seconds=stall_seconds)
        self._engine, self.pooling_info = engine, engine.pooling_info
        self._waiting: dict[str, _Waiting] = {}
        self._num_requests = 0

    async def pool(
        self,
        texts: Sequence[list[int]],
        *,
        second_starts: Sequence[int] = (),
        priority: int = 0,
        client: str | None = None,
        timeout_seconds: float | None = None,
    ) -> np.ndarray:
        """Computes the vectors or logits of texts. Cancelling drops those that are not computed yet.

        Args:
          texts: Token ids, as `InputReader` checks them; at least one.
          second_starts: Start of the second text of each pair; empty if the texts are not pairs.
          priority: Priority of the request; lower values run first.
          client: Client of the request; clients share steps equally.
          timeout_seconds: Time limit.

        Returns:
          float32 [number of texts, E], or [number of texts, labels].

        Raises:
          EngineError: The model failed, or a vector is not finite.
          DeadlineExceededError: The time limit has passed.
          UnavailableError: The engine accepts no more requests, or was shut down during this one.
        """
        self.check_open()
        self._num_requests += 1
        request_id = str(self._num_requests)
        waiting = _Waiting(len(texts), self.pooling_info.size, self._loop.create_future())
        self._waiting[request_id] = waiting
        self._engine.add(PoolTexts(request_id, list(texts), client, priority, list(second_starts)))
        try:
            async with asyncio.timeout(timeout_seconds):
                return await waiting.future
        except TimeoutError:
            raise DeadlineExceededError(f"the request was aborted: it took longer than {timeout_seconds} s") from None
        finally:
            del self._waiting[request_id]
            if waiting.num_left:
                self._engine.abort(request_id)

    def fail_all(self, error: Exception) -> None:
        for waiting in self._waiting.values():
            waiting.fail(error)

    def deliver(self, new: PoolingOutputs) -> None:
        # A request whose caller has left has no entry any more.
        for failure in new.failures:
            if (waiting := self._waiting.get(failure.request_id)) is not None:
                waiting.fail(failure.error())
        for pooled in new.pooled:
            if (waiting := self._waiting.get(pooled.request_id)) is None:
                continue
            waiting.vectors[pooled.indices] = np.frombuffer(pooled.vectors, "<f4").reshape(len(pooled.indices), -1)
            waiting.num_left -= len(pooled.indices)
            if not waiting.num_left and not waiting.future.done():
                waiting.future.set_result(waiting.vectors)
