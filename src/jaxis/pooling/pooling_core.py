"""The core of an engine that makes vectors: steps without a cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING

import jax
import numpy as np

from jaxis.engine.client.engine_client import EngineStats
from jaxis.engine.client.engine_core import EngineCore
from jaxis.engine.execution.calls import EngineCall
from jaxis.engine.execution.programs import CompileWait
from jaxis.engine.opened_model import open_model
from jaxis.pooling.embedder import load_bytes, open_embedder
from jaxis.pooling.pooling_info import PoolingInfo
from jaxis.pooling.pooling_model import PoolingModel
from jaxis.pooling.pooling_queue import PoolingQueue, QueuedRequest, QueuedText

if TYPE_CHECKING:
    from jaxis.engine.arguments import EngineArgs
    from jaxis.engine.memory_budget import MemoryBudget
    from jaxis.host.progress import ProgressDisplay


class PoolingCore(EngineCore):
    """Texts of a `PoolingModel`; see `EngineCore`. A step runs while the next one is prepared."""

    def __init__(self, model: PoolingModel) -> None:
        self._model = model
        self._queue = PoolingQueue()
        self._running: tuple[list[QueuedText], jax.Array] | None = None
        self.calls = {"pool": EngineCall(self._pool)}

    @property
    def has_work(self) -> bool:
        return self._running is not None or self._queue.num_texts > 0

    @property
    def stats(self) -> EngineStats:
        running = 0 if self._running is None else len(self._running[0])
        return EngineStats(num_requests_running=running, num_requests_waiting=self._queue.num_texts)

    @property
    def compile_wait(self) -> CompileWait | None:
        return self._model.compile_wait

    def step(self) -> None:
        texts = self._queue.take(self._model.max_step_tokens, self._model.max_step_texts)
        begun = None
        if texts:
            begun = texts, self._model.begin([text.token_ids for text in texts], [text.second_start for text in texts])
        finished, self._running = self._running, begun
        if finished is not None:
            vectors = np.asarray(finished[1], "<f4")
            finite: list[bool] = np.asarray(np.isfinite(vectors).all(1)).tolist()
            for text, vector, is_finite in zip(finished[0], vectors, finite, strict=False):
                text.request.put(text.index, vector, is_finite=is_finite)

    def _pool(
        self, texts: Sequence[Sequence[int]], second_starts: Sequence[int], client: str | None, priority: int
    ) -> Future[bytes]:
        request = QueuedRequest(texts, second_starts, client, priority)
        self._queue.add(request)
        return request.vectors


def build(
    args: EngineArgs,
    progress: ProgressDisplay,
    *,
    shared: MemoryBudget | None,
    admit: Callable[[int], None] | None,
) -> tuple[PoolingInfo, EngineCore]:
    """Builds an engine that makes vectors, as `EngineKind` says."""
    del shared  # the memory is fixed: no cache grows with it
    opened = open_model(args)
    if admit is not None:
        admit(load_bytes(opened.path))
    embedder = open_embedder(args, opened, progress)
    embedder.model.precompile()
    return embedder.info, PoolingCore(embedder.model)
