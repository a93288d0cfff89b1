"""The thread that computes vectors. No other thread uses the model while it runs."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from jaxis.engine.client.engine_client import EngineStats
from jaxis.engine.client.wire import RequestFailed
from jaxis.errors import EngineError
from jaxis.pooling.client.pooling_queue import PoolingQueue, QueuedText
from jaxis.pooling.client.wire import Pooled, PoolingOutputs, PoolTexts

if TYPE_CHECKING:
    import jax

    from jaxis.pooling.pooling_model import PoolingModel

COMPILE_STALL_SECONDS = 1800.0  # compiling a large model's program may take this long without being a stall
_logger = logging.getLogger(__name__)


class PoolingThread:
    """Runs steps while there are texts, and other threads' commands between steps.

    Attributes:
      stats: State of the queue after the last step.

    Args:
      model: The model.
      deliver: Receives the results of a step, in this thread.
      fail: Receives the error that ended the thread, in this thread; no step follows.
    """

    def __init__(
        self,
        model: PoolingModel,
        deliver: Callable[[PoolingOutputs], None],
        fail: Callable[[BaseException], None],
    ) -> None:
        self._model, self._deliver, self._fail = model, deliver, fail
        self.stats = EngineStats()
        self._busy_since: float | None = None
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._queue = PoolingQueue()
        self._running: tuple[list[QueuedText], jax.Array] | None = None
        self._thread = threading.Thread(target=self._run, name="jaxis-pooling", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def add(self, request: PoolTexts) -> None:
        """Queues a request. Called by other threads."""
        self._commands.put(lambda: self._queue.add(request))

    def abort(self, request_id: str) -> None:
        """Drops the remaining texts of a request. Called by other threads."""
        self._commands.put(lambda: self._queue.remove(request_id))

    def stop(self, timeout_seconds: float) -> bool:
        """Ends the thread; returns whether it has ended in time."""
        self._commands.put(None)
        self._thread.join(timeout_seconds)
        return not self._thread.is_alive()

    def is_making_progress(self, stall_seconds: float) -> bool:
        """Returns whether the thread is alive and its step is within the limit, or within the limit for compiling."""
        if not self._thread.is_alive():
            return False
        limit = max(stall_seconds, COMPILE_STALL_SECONDS) if self._model.is_compiling else stall_seconds
        since = self._busy_since
        return since is None or time.monotonic() - since < limit

    def _run(self) -> None:
        try:
            while self._take_commands():
                self._step()
        except BaseException as error:
            _logger.critical("the engine has failed for good", exc_info=True)
            self._fail(error)

    def _take_commands(self) -> bool:
        """Runs the queued commands; waits for one if there is nothing to compute. Returns False at the end."""
        wait = not self._queue.num_texts and self._running is None
        if wait:
            self._busy_since = None
        while True:
            try:
                command = self._commands.get(block=wait)
            except queue.Empty:
                return True
            finally:
                self._busy_since = time.monotonic()
            if command is None:
                return False
            command()
            wait = False

    def _step(self) -> None:
        """Starts a step and delivers the one before it, so that a step runs while the next is prepared."""
        texts = self._queue.take(self._model.max_step_tokens, self._model.max_step_texts)
        begun = None
        if texts:
            token_ids, starts = [text.token_ids for text in texts], [text.second_start for text in texts]
            begun = (texts, self._model.begin(token_ids, starts))
        finished, self._running = self._running, begun
        self.stats = EngineStats(num_requests_running=len(texts), num_requests_waiting=self._queue.num_texts)
        if finished is not None:
            self._deliver(_outputs(finished[0], np.asarray(finished[1])))


def _outputs(texts: Sequence[QueuedText], vectors: np.ndarray) -> PoolingOutputs:
    """Returns the results of a step by request."""
    vectors = vectors[: len(texts)].astype("<f4", copy=False)
    rows: dict[str, list[int]] = {}
    for row, text in enumerate(texts):
        rows.setdefault(text.request_id, []).append(row)
    outputs = PoolingOutputs([], [])
    for request_id, of_request in rows.items():
        found = vectors[of_request]
        indices = [texts[row].index for row in of_request]
        if not np.isfinite(found).all():
            bad = indices[int(np.argmin(np.isfinite(found).all(1)))]
            error = EngineError(
                f"the output for text {bad} is not finite: the model overflows, or its weights are broken"
            )
            outputs.failures.append(RequestFailed.of(request_id, error))
        else:
            outputs.pooled.append(Pooled(request_id, indices, found.tobytes()))
    return outputs
