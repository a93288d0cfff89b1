"""The engine behind an event loop: a process or thread of its own steps it, coroutines wait for what it brings.

Only the engine's thread (`EngineThread`) touches the engine: in another process (`EngineProcess`), as the server has
it, or in this one (`LocalEngine`). It gets its work as commands in a queue and hands what a step brought to the event
loop in one call a step, not one a token. Only the loop touches the streams. So neither side needs a lock.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from jaxis.engine.frontend.engine_process import EngineProcess
from jaxis.engine.frontend.engine_thread import EngineStats, Outbox, Submission
from jaxis.engine.frontend.local_engine import LocalEngine
from jaxis.engine.frontend.output_stream import OutputStream
from jaxis.engine.frontend.stream_waker import StreamWaker
from jaxis.errors import DeadlineExceededError, OverloadedError, RequestError, UnavailableError
from jaxis.outputs import RequestOutput
from jaxis.prompts import TokenizedPrompt
from jaxis.sampling_params import SamplingParams

if TYPE_CHECKING:
    from jaxis.engine.grammar.delayed_grammar import Grammar
    from jaxis.engine.setup import BuiltEngine

DEFAULT_MAX_QUEUED = 512
DEFAULT_STALL_SECONDS = 120.0
JOIN_SECONDS = 10.0

_logger = logging.getLogger(__name__)


class AsyncLLMEngine:
    """Serves coroutines of one event loop.

    Call `start` in the loop before anything else, and `shutdown` at the end.

    Args:
      engine: One in another process, or a built one, which nobody else may use from `start` to `shutdown`.
      max_queued: Most sequences to hold beyond those that can run at once.
      stall_seconds: How long a step may take before `is_making_progress` is False, beyond the time that it waits for
        a program to compile.
    """

    def __init__(
        self,
        engine: EngineProcess | BuiltEngine,
        *,
        max_queued: int = DEFAULT_MAX_QUEUED,
        stall_seconds: float = DEFAULT_STALL_SECONDS,
    ) -> None:
        self._engine = engine if isinstance(engine, EngineProcess) else LocalEngine(engine)
        self.default_sampling_params = self._engine.default_sampling_params
        self.tokenizer = self._engine.tokenizer
        self.grammar_compiler = self._engine.grammar_compiler
        self.max_model_len = self._engine.max_model_len
        self.max_num_seqs = self._engine.max_num_seqs
        self.model_type = self._engine.model_type
        self.max_sequences = self.max_num_seqs + max_queued
        self._stall_seconds = stall_seconds
        self._streams: dict[str, OutputStream] = {}
        self._num_reserved = 0
        self._closed: UnavailableError | None = None
        self._all_released = asyncio.Event()
        self._all_released.set()

    def start(self) -> None:
        """Lets the engine work; results go to the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._waker = StreamWaker(self._loop)
        self._engine.connect(self._loop, self._deliver, self._close)

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
        grammar: Grammar | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Runs one request; closing the generator (`contextlib.aclosing`) before its end aborts it.

        Args:
          prompt: The prompt.
          params: How to sample and when to stop.
          request_id: Unique among unfinished requests.
          priority: The lower value is served first.
          timeout_seconds: From now to the end of the answer.
          final_only: Yield once, at the end: who needs no stream saves the event loop most of its work.
          grammar: `params.structured_outputs`, compiled by the engine's `grammar_compiler` on another thread.

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
        self._engine.add(Submission(stream, request_id, prompt, params, priority, final_only, grammar))
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
        self._engine.abort(request_id)

    @property
    def is_making_progress(self) -> bool:
        """Whether the engine lives and, if it has something to do, has lately completed a step, or compiles one."""
        return self._closed is None and self._engine.is_making_progress(self._stall_seconds)

    @property
    def num_cache_tokens(self) -> int:
        """Tokens that the KV cache holds."""
        return self._engine.num_cache_tokens

    @property
    def is_accepting(self) -> bool:
        """Whether new requests are taken."""
        return self._closed is None

    def stats(self) -> EngineStats:
        """The engine after its last step."""
        return self._engine.stats

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
        """Ends every request, and the engine's process or thread; a built engine is left as it was, open."""
        self._closed = self._closed or UnavailableError("the server is shutting down: send the request to another one")
        self._fail_streams(self._closed)
        if not await asyncio.to_thread(self._engine.stop, JOIN_SECONDS):
            _logger.error("the engine's step has not ended after %g s and is given up", JOIN_SECONDS)

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
        self._waker.wake(stream for stream, _ in outbox)

    def _close(self, error: BaseException) -> None:
        reason = str(error).partition("\n")[0] or type(error).__name__
        self._closed = UnavailableError(f"the engine has failed and must be restarted: {reason}")
        self._fail_streams(self._closed)
