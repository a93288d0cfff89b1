"""Asynchronous engine for vectors: coroutines wait for those of their texts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jaxis.engine.client.async_engine import AsyncEngine, EngineClient
from jaxis.pooling.pooling_info import PoolingInfo

MAX_TEXTS = 2048  # in a request: OpenAI's limit


class AsyncPoolingEngine(AsyncEngine):
    """The `AsyncEngine` of a model that makes vectors or logits.

    Args:
      engine: The engine.
      max_queued: Limit of waiting texts beyond those of one request.
      stall_seconds: Longest time of a step, as in `AsyncEngine`.

    Attributes:
      pooling_info: Facts about the model.
      reader: Reader of requests' inputs.
    """

    unit = "texts"
    advice = "send fewer texts at a time"

    def __init__(self, engine: EngineClient, *, max_queued: int, stall_seconds: float) -> None:
        super().__init__(engine, max_sequences=MAX_TEXTS + max_queued, stall_seconds=stall_seconds)
        assert isinstance(engine.info, PoolingInfo)
        self.pooling_info = engine.info
        self.reader = engine.info.reader(engine.tokenizer)

    async def pool(
        self,
        texts: Sequence[Sequence[int]],
        *,
        second_starts: Sequence[int] = (),
        priority: int = 0,
        client: str | None = None,
    ) -> np.ndarray:
        """Computes the vectors or logits of texts. Cancelling drops those that are not computed yet.

        Args:
          texts: Token ids, as `InputReader` checks them; at least one.
          second_starts: Start of the second text of each pair; empty if the texts are not pairs.
          priority: Priority of the request; lower values run first.
          client: Client of the request; clients share steps equally.

        Returns:
          float32 [number of texts, E], or [number of texts, labels].

        Raises:
          EngineError: The model failed, or a vector is not finite.
          UnavailableError: The engine accepts no more requests, or was shut down during this one.
        """
        vectors = await self.call("pool", texts, second_starts, client, priority, returns=bytes)
        return np.frombuffer(vectors, "<f4").reshape(len(texts), -1)
