"""The engine behind an event loop: a thread of its own steps it, coroutines wait for what comes of their requests.

Only the thread touches the engine. It gets its work as commands in a queue and hands what a step brought to the event
loop in one call a step, not one a token. Only the loop touches the streams. So neither side needs a lock.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import queue
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from jaxis.engine.output_stream import DeltaTracker, OutputStream
from jaxis.errors import DeadlineExceededError, EngineError, JaxisError, OverloadedError, RequestError, UnavailableError
from jaxis.outputs import RequestOutput
from jaxis.prompts import TokenizedPrompt
from jaxis.sampling_params import SamplingParams

if TYPE_CHECKING:
    from jaxis.engine.setup import BuiltEngine

DEFAULT_MAX_QUEUED = 512
DEFAULT_STALL_SECONDS = 120.0
COMPILE_STALL_SECONDS = 1800.0  # for compiling a large model's program, which is no stall
JOIN_SECONDS = 10.0

Outbox = list[tuple[OutputStream, RequestOutput | Exception]]
_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class EngineStats:
    """The engine after its last step; the last three count from the start.

    Attributes:
      num_requests_running: Sequences in the running batch.
      num_requests_waiting: Sequences that wait to be admitted, preempted ones among them.
      kv_cache_usage: Share of the KV cache's blocks in use, 0 to 1.
      prefix_cache_queries: Prompt tokens looked up in the prefix cache.
      prefix_cache_hits: How many of those were found.
      num_preemptions: Times that a sequence lost its blocks to another.
    """

    num_requests_running: int = 0
    num_requests_waiting: int = 0
    kv_cache_usage: float = 0.0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    num_preemptions: int = 0


class AsyncLLMEngine:
    """Serves coroutines of one event loop.

    Call `start` in the loop before anything else, and `shutdown` at the end.

    Args:
      built: The engine; nobody else may use it from `start` to `shutdown`.
      max_queued: Most sequences to hold beyond those that can run at once.
      stall_seconds: How long a step may take before `is_making_progress` is False, beyond the time that it waits for
        a program to compile.
    """

    def __init__(
        self,
        built: BuiltEngine,
        *,
        max_queued: int = DEFAULT_MAX_QUEUED,
        stall_seconds: float = DEFAULT_STALL_SECONDS,
    ) -> None:
        self.default_sampling_params = built.default_sampling_params
        self.tokenizer = built.engine.tokenizer
        self.max_model_len = built.engine.max_model_len
        self.max_sequences = built.engine.vllm_config.scheduler_config.max_num_seqs + max_queued
        self._engine = built.engine
        self._stall_seconds = stall_seconds
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._trackers: dict[str, DeltaTracker] = {}  # the thread's
        self._streams: dict[str, OutputStream] = {}  # the loop's
        self._num_reserved = 0
        self._closed: UnavailableError | None = None
        self._all_released = asyncio.Event()
        self._all_released.set()
        self._busy_since: float | None = None
        self._stats = EngineStats()
        self._thread = threading.Thread(target=self._run, name="jaxis-engine", daemon=True)

    # What the event loop calls.

    def start(self) -> None:
        """Starts the engine's thread; results go to the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    @contextmanager
    def reserve(self, num_sequences: int = 1) -> Iterator[None]:
        """Holds places for sequences while the block runs: taken before a request is preprocessed, kept to its end.

        Raises:
          RequestError: More sequences than there are places at all.
          OverloadedError: Not enough free places.
          UnavailableError: The engine takes no more requests.
        """
        if self._closed is not None:
            raise self._closed
        if num_sequences > self.max_sequences:
            raise RequestError(
                f"the request asks for {num_sequences} completions, and this server holds at most "
                f"{self.max_sequences}: send fewer prompts at a time, or lower n"
            )
        if self._num_reserved + num_sequences > self.max_sequences:
            raise OverloadedError(f"the server is busy with {self._num_reserved} completions: try again later")
        self._num_reserved += num_sequences
        self._all_released.clear()
        try:
            yield
        finally:
            self._num_reserved -= num_sequences
            if self._num_reserved == 0:
                self._all_released.set()

    async def generate(
        self,
        prompt: TokenizedPrompt,
        params: SamplingParams,
        request_id: str,
        *,
        priority: int = 0,
        timeout_seconds: float | None = None,
        final_only: bool = False,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Runs one request; closing the generator (`contextlib.aclosing`) before its end aborts it.

        Args:
          prompt: The prompt.
          params: How to sample and when to stop.
          request_id: Unique among unfinished requests.
          priority: The lower value is served first.
          timeout_seconds: From now to the end of the answer.
          final_only: Yield once, at the end: who needs no stream saves the event loop most of its work.

        Yields:
          What is new: `outputs` holds the completions that got further, each with its new text and tokens only;
          `prompt_logprobs` come with the first one.

        Raises:
          RequestError: The prompt or a parameter cannot be honoured.
          EngineError: A step failed, or the model's logits for this request are not finite.
          DeadlineExceededError: `timeout_seconds` have passed.
          UnavailableError: The engine takes no more requests, or was shut down meanwhile.
        """
        if self._closed is not None:
            raise self._closed
        if request_id in self._streams:
            raise RequestError(f"request {request_id!r} exists already: wait for it, abort it, or choose another id")
        stream = self._streams[request_id] = OutputStream()
        timer = None
        if timeout_seconds is not None:
            timer = self._loop.call_later(timeout_seconds, self._expire, request_id, timeout_seconds)
        self._commands.put(functools.partial(self._add, stream, request_id, prompt, params, priority, final_only))
        finished = False
        try:
            while not finished:
                output = await stream.get()
                finished = output.finished
                yield output
        finally:
            if timer is not None:
                timer.cancel()
            del self._streams[request_id]
            if not stream.ended:
                self.abort(request_id)

    def abort(self, request_id: str) -> None:
        """Ends a request if it is unfinished: who waits for it gets its last output, with finish_reason "abort"."""
        self._commands.put(functools.partial(self._abort, request_id))

    @property
    def is_making_progress(self) -> bool:
        """Whether the thread is alive and, if it has something to do, has lately completed a step, or compiles one."""
        if self._closed is not None or not self._thread.is_alive():
            return False
        since, limit = self._busy_since, self._stall_seconds
        if since is None:
            return True
        compile_wait = self._engine.last_compile_wait
        if compile_wait is not None and compile_wait.ended is None:
            since, limit = compile_wait.started, max(limit, COMPILE_STALL_SECONDS)
        elif compile_wait is not None:
            since = max(since, compile_wait.ended)
        return time.monotonic() - since < limit

    @property
    def is_accepting(self) -> bool:
        """Whether new requests are taken."""
        return self._closed is None

    def stats(self) -> EngineStats:
        """The engine after its last step."""
        return self._stats

    async def drain(self, deadline_seconds: float) -> None:
        """Takes no more requests, and returns when those there are have ended, at the latest after the deadline.

        What is unfinished then fails with UnavailableError.
        """
        self._closed = self._closed or UnavailableError("the server is shutting down: send the request to another one")
        try:
            async with asyncio.timeout(deadline_seconds):
                await self._all_released.wait()
        except TimeoutError:
            self._fail_streams(UnavailableError("the server shut down before the answer was complete"))

    async def shutdown(self) -> None:
        """Ends every request and the thread; the engine itself is left as it was, open."""
        self._closed = self._closed or UnavailableError("the server is shutting down: send the request to another one")
        self._fail_streams(self._closed)
        self._commands.put(None)
        await asyncio.to_thread(self._thread.join, JOIN_SECONDS)
        if self._thread.is_alive():
            _logger.error("the engine's step has not ended after %g s and is left behind", JOIN_SECONDS)

    def _expire(self, request_id: str, timeout_seconds: float) -> None:
        stream = self._streams.get(request_id)
        if stream is not None and not stream.ended:
            stream.fail(DeadlineExceededError(f"the request was aborted: it took longer than {timeout_seconds:g} s"))
            self.abort(request_id)

    def _fail_streams(self, error: Exception) -> None:
        for request_id, stream in self._streams.items():
            if not stream.ended:
                stream.fail(error)
                self.abort(request_id)

    def _deliver(self, outbox: Outbox) -> None:
        for stream, result in outbox:
            if isinstance(result, Exception):
                stream.fail(result)
            else:
                stream.put(result)

    def _close(self, error: UnavailableError) -> None:
        self._closed = error
        self._fail_streams(error)

    # What the engine's thread calls.

    def _run(self) -> None:
        try:
            while self._take_commands():
                if self._engine.has_unfinished:
                    self._post(self._step())
                self._update_stats()
        except BaseException as error:
            _logger.critical("the engine has failed for good", exc_info=True)
            reason = str(error).partition("\n")[0] or type(error).__name__
            self._call_soon(self._close, UnavailableError(f"the engine has failed and must be restarted: {reason}"))
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

    def _add(
        self,
        stream: OutputStream,
        request_id: str,
        prompt: TokenizedPrompt,
        params: SamplingParams,
        priority: int,
        final_only: bool,
    ) -> None:
        try:
            state = self._engine.add_request(
                request_id,
                prompt.token_ids,
                params,
                prompt=prompt.text,
                priority=priority,
                cache_salt=prompt.cache_salt,
            )
        except JaxisError as error:
            self._post([(stream, error)])
        except Exception as error:
            _logger.exception("a request could not be queued")
            self._post([(stream, EngineError(f"the request could not be queued: {error}"))])
        else:
            self._trackers[request_id] = DeltaTracker(state, stream, final_only=final_only)

    def _abort(self, request_id: str) -> None:
        tracker = self._trackers.pop(request_id, None)
        if tracker is not None:
            self._engine.abort_request(request_id)
            self._post([(tracker.stream, tracker.take())])

    def _step(self) -> Outbox:
        try:
            states = self._engine.step()
        except EngineError:
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
            result = tracker.take() if state.error is None else EngineError(str(state.error))
            outbox.append((tracker.stream, result))
        return outbox

    def _update_stats(self) -> None:
        scheduler = self._engine.scheduler
        blocks = scheduler.block_manager
        self._stats = EngineStats(
            num_requests_running=scheduler.num_running,
            num_requests_waiting=scheduler.num_waiting,
            kv_cache_usage=blocks.usage,
            prefix_cache_queries=blocks.prefix_cache_queries,
            prefix_cache_hits=blocks.prefix_cache_hits,
            num_preemptions=self._engine.num_preemptions,
        )

    def _post(self, outbox: Outbox) -> None:
        if outbox:
            self._call_soon(self._deliver, outbox)

    def _call_soon(self, function: Callable[..., None], argument: object) -> None:
        try:
            self._loop.call_soon_threadsafe(function, argument)
        except RuntimeError:  # the loop is closed: nobody waits any more
            _logger.debug("the event loop ended before the engine")
