"""The thread that steps the engine. Nobody else touches the engine while it runs."""

from __future__ import annotations

import functools
import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from jaxis.engine.frontend.output_stream import DeltaTracker, OutputStream
from jaxis.errors import EngineError, JaxisError
from jaxis.outputs import RequestOutput
from jaxis.prompts import TokenizedPrompt
from jaxis.sampling_params import SamplingParams

if TYPE_CHECKING:
    from jaxis.engine.engine import LLMEngine
    from jaxis.engine.grammar.delayed_grammar import Grammar

COMPILE_STALL_SECONDS = 1800.0  # for compiling a large model's program, which is no stall
MAX_FAILED_STEPS = 3  # one after another: the engine is at fault then, not a request
# What a step brought for a stream, and for each stream that it concerns.
Delivery = tuple[OutputStream | str, RequestOutput | Exception]
Outbox = list[Delivery]
_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class EngineStats:
    """The engine after its last step; the queries, hits and preemptions count from the start.

    Attributes:
      num_requests_running: Sequences in the running batch.
      num_requests_waiting: Sequences that wait to be admitted, preempted ones among them.
      kv_cache_usage: Share of the KV cache's blocks in use, 0 to 1.
      prefix_cache_queries: Prompt tokens looked up in the prefix cache.
      prefix_cache_hits: How many of those were found.
      num_preemptions: Times that a sequence lost its blocks to another.
      process_memory_bytes: Resident memory of the engine's process; 0 where it has none of its own.
    """

    num_requests_running: int = 0
    num_requests_waiting: int = 0
    kv_cache_usage: float = 0.0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    num_preemptions: int = 0
    process_memory_bytes: int = 0


@dataclass(frozen=True)
class Submission:
    """A request on its way to the engine.

    Attributes:
      stream: Where its outputs go; in the engine's own process, the request's id.
      request_id: Unique among unfinished requests.
      prompt: The prompt.
      params: How to sample and when to stop.
      priority: The lower value is served first.
      final_only: Hand out everything at the end.
      grammar: `params.structured_outputs`, compiled.
    """

    stream: OutputStream | str
    request_id: str
    prompt: TokenizedPrompt
    params: SamplingParams
    priority: int
    final_only: bool
    grammar: Grammar | None


class EngineThread:
    """Steps the engine while there is something to do, and carries out what others ask for in between.

    Attributes:
      stats: The engine after its last step.

    Args:
      engine: The engine.
      deliver: Called in the thread with what a step brought.
      fail: Called in the thread with the error that ended it; no step will follow.
    """

    def __init__(
        self, engine: LLMEngine, deliver: Callable[[Outbox], None], fail: Callable[[BaseException], None]
    ) -> None:
        self._engine = engine
        self._deliver = deliver
        self._fail = fail
        self.stats = EngineStats()
        self._busy_since: float | None = None  # when it took up what it is doing
        self._num_failed_steps = 0  # since the last one that did not fail
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._trackers: dict[str, DeltaTracker] = {}
        self._thread = threading.Thread(target=self._run, name="jaxis-engine", daemon=True)

    # What other threads call.

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def add(self, submission: Submission) -> None:
        """Queues a request; its stream gets an error if it cannot be honoured."""
        self._commands.put(functools.partial(self._add, submission))

    def abort(self, request_id: str) -> None:
        """Ends a request if it is unfinished; its stream gets its last output, with finish_reason "abort"."""
        self._commands.put(functools.partial(self._abort, request_id))

    def stop(self, timeout_seconds: float) -> bool:
        """Ends every request and the thread; returns whether it has ended in time."""
        self._commands.put(None)
        self._thread.join(timeout_seconds)
        return not self._thread.is_alive()

    def is_making_progress(self, stall_seconds: float) -> bool:
        """Whether the thread is alive, steps do not always fail, and one has lately ended or compiles, if one is due.

        Args:
          stall_seconds: How long a step may take.
        """
        if not self._thread.is_alive() or self._num_failed_steps >= MAX_FAILED_STEPS:
            return False
        since, limit = self._busy_since, stall_seconds
        if since is None:
            return True
        compile_wait = self._engine.last_compile_wait
        if compile_wait is not None and compile_wait.ended is None:
            since, limit = compile_wait.started, max(limit, COMPILE_STALL_SECONDS)
        elif compile_wait is not None:
            since = max(since, compile_wait.ended)
        return time.monotonic() - since < limit

    # What the thread itself calls.

    def _run(self) -> None:
        try:
            while self._take_commands():
                if self._engine.has_unfinished:
                    self._post(self._step())
                self._update_stats()
        except BaseException as error:
            _logger.critical("the engine has failed for good", exc_info=True)
            self._fail(error)
            return
        for request_id in list(self._trackers):
            self._engine.abort_request(request_id)
        self._trackers.clear()
        self._update_stats()

    def _take_commands(self) -> bool:
        """Carries out what is in the queue, waiting for something if there is no step to run; False to end."""
        wait = not self._engine.has_unfinished
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

    def _add(self, new: Submission) -> None:
        try:
            state = self._engine.add_request(
                new.request_id,
                new.prompt.token_ids,
                new.params,
                prompt=new.prompt.text,
                priority=new.priority,
                cache_salt=new.prompt.cache_salt,
                grammar=new.grammar,
            )
        except JaxisError as error:
            self._post([(new.stream, error)])
        except Exception as error:
            _logger.exception("a request could not be queued")
            self._post([(new.stream, EngineError(f"the request could not be queued: {error}"))])
        else:
            self._trackers[new.request_id] = DeltaTracker(state, new.stream, final_only=new.final_only)

    def _abort(self, request_id: str) -> None:
        tracker = self._trackers.pop(request_id, None)
        if tracker is not None:
            self._engine.abort_request(request_id)
            self._post([(tracker.stream, tracker.take())])

    def _step(self) -> Outbox:
        try:
            states = self._engine.step()
            self._num_failed_steps = 0
        except EngineError:
            self._num_failed_steps += 1
            _logger.exception("a step failed")
            states = [tracker.state for tracker in self._trackers.values() if tracker.state.error is not None]
        outbox: Outbox = []
        now = time.monotonic()
        for state in states:
            tracker = self._trackers.get(state.request_id)
            if tracker is None:
                continue
            if tracker.first_token_time is None:
                tracker.first_token_time = now
            if state.finished:
                del self._trackers[state.request_id]
            elif tracker.final_only:
                continue
            result = tracker.take() if state.error is None else type(state.error)(str(state.error))
            outbox.append((tracker.stream, result))
        return outbox

    def _update_stats(self) -> None:
        scheduler = self._engine.scheduler
        blocks = scheduler.block_manager
        self.stats = EngineStats(
            num_requests_running=scheduler.num_running,
            num_requests_waiting=scheduler.num_waiting,
            kv_cache_usage=blocks.usage,
            prefix_cache_queries=blocks.prefix_cache_queries,
            prefix_cache_hits=blocks.prefix_cache_hits,
            num_preemptions=self._engine.num_preemptions,
        )

    def _post(self, outbox: Outbox) -> None:
        if outbox:
            self._deliver(outbox)
