"""The engine behind an event loop: another process steps it, and coroutines wait for their outputs.

Only the engine's thread (`EngineThread`), in the engine's process (`EngineProcess`), touches the engine. It takes
commands from a queue, and sends the outputs of a step in one message a step, not one a token. Only the event loop
touches the streams, so neither side needs a lock.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from jaxis.engine.client.engine_change import EngineChange, Pause, Resume, Sleep, UpdateWeights, WakeUp
from jaxis.engine.client.engine_client import (
    AdapterLoad,
    ChangeDone,
    EngineCallbacks,
    EngineClient,
    EngineOutputs,
    EngineStats,
    RequestState,
    Submission,
    WorkerClient,
)
from jaxis.engine.client.output_stream import OutputStream
from jaxis.engine.client.stream_waker import StreamWaker
from jaxis.errors import DeadlineExceededError, EngineError, OverloadedError, RequestError, UnavailableError
from jaxis.outputs import FIRST_VERSION, RequestOutput
from jaxis.prompts import TokenizedPrompt
from jaxis.sampling_params import SamplingParams

if TYPE_CHECKING:
    from jaxis.engine.grammar.compiler import GrammarCompiler
    from jaxis.engine.grammar.matcher import Grammar

JOIN_SECONDS = 10.0
DESCRIBE_SECONDS = 10.0

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class UnfinishedRequest:
    """A request that was given to the engine.

    Attributes:
      request_id: Id that the client knows.
      client: Client of the request.
      priority: Priority; the lower value is served first.
      num_prompt_tokens: Tokens of its prompt.
      arrival: Time of its arrival, in seconds of `time.monotonic`.
    """

    request_id: str
    client: str | None
    priority: int
    num_prompt_tokens: int
    arrival: float = field(default_factory=time.monotonic)


class AsyncEngine(ABC):
    """Serves coroutines of one event loop with an engine of any kind.

    Call `start` in the loop before anything else, and `shutdown` at the end.

    Attributes:
      info, tokenizer: Facts about the engine, and its tokenizer.
      failure: Error that has ended the engine for good; None while it runs.
      grammar_compiler: Compiler of `structured_outputs`; None if the engine generates nothing.
      unit: Clients' word for sequences, in error messages.
      advice: Advice how to ask for fewer, in error messages.

    Args:
      engine: The engine.
      max_sequences: Most sequences to hold, running and queued.
      stall_seconds: Longest time of a step before `is_making_progress` is False, not counting the wait for a program to
        compile.
    """

    unit: ClassVar[str]
    advice: ClassVar[str]
    grammar_compiler: GrammarCompiler | None = None

    def __init__(self, engine: WorkerClient, *, max_sequences: int, stall_seconds: float) -> None:
        self._worker = engine
        self.info = engine.info
        self.tokenizer = engine.tokenizer
        self.max_sequences = max_sequences
        self._stall_seconds = stall_seconds
        self._num_reserved = 0
        self.failure: EngineError | None = None
        self._closed: UnavailableError | None = None
        self._interruption: UnavailableError | None = None
        self._all_released = asyncio.Event()
        self._all_released.set()

    @abstractmethod
    def fail_all(self, error: Exception) -> None:
        """Ends every request with an error."""

    @abstractmethod
    def deliver(self, new: Any) -> None:
        """Hands the outputs of a step to the coroutines that wait for them."""

    def check_open(self) -> None:
        """Raises UnavailableError if the engine takes no more requests."""
        if self._closed is not None:
            raise self._closed

    def start(self) -> None:
        """Starts the engine; its outputs go to the running event loop."""
        self._loop = asyncio.get_running_loop()
        callbacks = EngineCallbacks(self.deliver, self._interrupt, self._resume, self._fail)
        self._worker.connect(self._loop, callbacks)

    @contextmanager
    def reserve(self, num_sequences: int = 1) -> Iterator[None]:
        """Reserves places for sequences during the `with` block, which covers a request from preprocessing to its end.

        Raises:
          RequestError: More sequences than the engine has places.
          OverloadedError: Not enough free places.
          UnavailableError: The engine takes no more requests.
        """
        self.check_open()
        if num_sequences > self.max_sequences:
            raise RequestError(
                f"the request asks for {num_sequences} {self.unit}, and this server holds at most "
                f"{self.max_sequences}: {self.advice}"
            )
        if self._num_reserved + num_sequences > self.max_sequences:
            raise OverloadedError(f"the server is busy with {self._num_reserved} {self.unit}: try again later")
        self._num_reserved += num_sequences
        self._all_released.clear()
        try:
            yield
        finally:
            self._num_reserved -= num_sequences
            if self._num_reserved == 0:
                self._all_released.set()

    @property
    def is_making_progress(self) -> bool:
        """True if the engine is alive and, if it has work, has recently completed a step or is compiling one."""
        return self._closed is None and self._worker.is_making_progress(self._stall_seconds)

    @property
    def is_accepting(self) -> bool:
        return self._closed is None

    @property
    def num_reserved(self) -> int:
        """Completions that run or wait, including those whose prompts are still being prepared."""
        return self._num_reserved

    def stats(self) -> EngineStats:
        """Returns the state of the engine after a recent step."""
        return self._worker.stats

    async def drain(self, deadline_seconds: float) -> None:
        """Stops taking requests, and returns when the running ones have ended, or at the deadline.

        Requests that are unfinished at the deadline fail with UnavailableError.
        """
        self._closed = self._closed or UnavailableError("the server is shutting down: send the request to another one")
        try:
            async with asyncio.timeout(deadline_seconds):
                await self._all_released.wait()
        except TimeoutError:
            self.fail_all(UnavailableError("the server shut down before the answer was complete"))

    async def describe(self) -> list[tuple[UnfinishedRequest, RequestState | None]]:
        """Returns unfinished requests with their states; an empty list if the engine does not report them.

        Raises:
          UnavailableError: The engine takes no more requests.
        """
        self.check_open()
        return []

    def reset_prefix_cache(self) -> None:
        """Empties the prefix cache for new requests; running ones go on.

        Raises:
          UnavailableError: The engine takes no more requests.
        """
        self.check_open()

    async def shutdown(self) -> None:
        """Ends every request, and the engine's process or thread."""
        self._closed = self._closed or UnavailableError("the server is shutting down: send the request to another one")
        self.fail_all(self._closed)
        if not await asyncio.to_thread(self._worker.stop, JOIN_SECONDS):
            _logger.error("the engine's step did not end within %g s and was abandoned", JOIN_SECONDS)

    def _interrupt(self, error: BaseException) -> None:
        self._interruption = UnavailableError(
            f"{_reason(error)}; the engine is being started again: send the request again in a while"
        )
        self._closed = self._closed or self._interruption
        self.fail_all(self._interruption)

    def _resume(self) -> None:
        if self._closed is self._interruption:
            self._closed = None

    def _fail(self, error: BaseException) -> None:
        self.failure = EngineError(f"the engine has failed and must be restarted: {_reason(error)}")
        self._closed = UnavailableError(str(self.failure))
        self.fail_all(self._closed)


class AsyncLLMEngine(AsyncEngine):
    """The `AsyncEngine` of an engine that generates.

    Attributes:
      is_paused: True if requests wait for `Resume`.
      weights_version: Version of the weights; FIRST_VERSION until they are updated.

    Args:
      engine: The engine.
      max_queued: Most sequences to hold beyond those that can run at once.
      stall_seconds: Longest time of a step, as in `AsyncEngine`.
    """

    unit = "completions"
    advice = "send fewer prompts at a time, or lower n"

    def __init__(self, engine: EngineClient, *, max_queued: int, stall_seconds: float) -> None:
        super().__init__(engine, max_sequences=engine.info.max_num_seqs + max_queued, stall_seconds=stall_seconds)
        self._engine = engine
        self.grammar_compiler = engine.grammar_compiler
        # A client may reuse the id of a request that was aborted. The engine's own ids are never reused, so late
        # outputs of the first request cannot reach the second.
        self._streams: dict[str, OutputStream] = {}  # by the engine's ids
        self._requests: dict[str, UnfinishedRequest] = {}  # likewise
        self._descriptions: list[asyncio.Future[list[RequestState]]] = []
        self._engine_ids: dict[str, str] = {}  # by the requests' own ids
        self._num_requests = 0
        self._loads: dict[int, asyncio.Future[AdapterLoad]] = {}
        self._changes: dict[int, asyncio.Future[ChangeDone]] = {}
        self._num_calls = 0
        self._updates = asyncio.Lock()
        self.is_paused = False
        self._asleep: set[str] = set()
        self.weights_version: str | int = FIRST_VERSION

    def start(self) -> None:
        self._waker = StreamWaker(asyncio.get_running_loop())
        super().start()

    async def generate(
        self,
        prompt: TokenizedPrompt,
        params: SamplingParams,
        request_id: str,
        *,
        priority: int = 0,
        client: str | None = None,
        timeout_seconds: float | None = None,
        final_only: bool = False,
        grammar: Grammar | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Runs one request; closing the generator (`contextlib.aclosing`) before its end aborts it.

        Args:
          prompt: The prompt.
          params: Parameters of sampling and stopping.
          request_id: Id, unique among unfinished requests.
          priority: Priority; the lower value is served first.
          client: Client of the request; clients share the tokens of steps equally.
          timeout_seconds: Time limit from now to the end of the answer.
          final_only: True to yield once, at the end, which spares the event loop most of the work of streaming.
          grammar: `params.structured_outputs`, compiled by the engine's `grammar_compiler` on another thread, with
            `params.thinking_token_budget`.

        Yields:
          The additions: `outputs` holds the completions with additions, each with only its new text and tokens;
          `prompt_logprobs` come with the first one.

        Raises:
          RequestError: The prompt or a parameter cannot be honoured.
          EngineError: A step failed, or the model's logits for this request are not finite.
          DeadlineExceededError: `timeout_seconds` have passed.
          UnavailableError: The engine takes no more requests, or was shut down meanwhile.
        """
        self.check_open()
        if request_id in self._engine_ids:
            raise RequestError(f"request {request_id!r} already exists: wait for it, abort it, or choose another id")
        self._num_requests += 1
        engine_id = f"{request_id}#{self._num_requests}"
        self._engine_ids[request_id] = engine_id
        stream = self._streams[engine_id] = OutputStream()
        self._requests[engine_id] = UnfinishedRequest(request_id, client, priority, len(prompt.token_ids))
        timer = None
        if timeout_seconds is not None:
            timer = self._loop.call_later(timeout_seconds, self._expire, engine_id, timeout_seconds)
        self._engine.add(Submission(engine_id, prompt, params, priority, client, final_only, grammar))
        prompt_token_ids = list(prompt.token_ids)
        finished = False
        try:
            while not finished:
                output = await stream.get()
                finished = output.finished
                output.request_id = request_id
                output.prompt, output.prompt_token_ids = prompt.text, prompt_token_ids
                yield output
        finally:
            if timer is not None:
                timer.cancel()
            del self._streams[engine_id], self._engine_ids[request_id], self._requests[engine_id]
            if not stream.ended:
                self._engine.abort(engine_id)

    def abort(self, request_id: str) -> None:
        """Ends a request if it is unfinished: its reader gets a last output, with finish_reason "abort"."""
        if request_id in self._engine_ids:
            self._engine.abort(self._engine_ids[request_id])

    def reset_prefix_cache(self) -> None:
        super().reset_prefix_cache()
        self._engine.reset_prefix_cache()

    async def load_adapter(self, source: str) -> AdapterLoad:
        """Loads an adapter from a folder. Prompts use its digest to name it.

        Raises:
          JaxisError: The adapter cannot be loaded.
          UnavailableError: The engine takes no more requests, or was shut down meanwhile.
        """
        self.check_open()
        self._num_calls += 1
        call_id, loaded = self._num_calls, self._loop.create_future()
        self._loads[call_id] = loaded
        self._engine.load_adapter(call_id, source)
        try:
            return await loaded
        finally:
            self._loads.pop(call_id, None)

    @property
    def is_asleep(self) -> bool:
        """True if the engine sleeps, and requests wait."""
        return bool(self._asleep)

    async def change(self, change: EngineChange) -> None:
        """Changes the engine between two steps. The change is completed even if the caller is cancelled.

        Raises:
          JaxisError: The change is not possible; nothing has changed.
          UnavailableError: The engine takes no more requests, or was shut down meanwhile.
        """
        self.check_open()
        await asyncio.shield(asyncio.ensure_future(self._change(change)))

    async def _change(self, change: EngineChange) -> None:
        # Weights are read while steps run. The lock keeps updates in the order of their calls.
        async with self._updates if isinstance(change, UpdateWeights) else contextlib.nullcontext():
            self._num_calls += 1
            call_id, waiting = self._num_calls, self._loop.create_future()
            self._changes[call_id] = waiting
            self._engine.change(call_id, change)
            try:
                done = await waiting
            finally:
                self._changes.pop(call_id, None)
        self.info = dataclasses.replace(self.info, fingerprint=done.fingerprint)
        self.weights_version = done.version
        match change:
            case Pause() | Resume():
                self.is_paused = isinstance(change, Pause)
            case Sleep():
                self._asleep = {"weights", "kv_cache"}
            case WakeUp():
                self._asleep -= self._asleep if change.parts is None else set(change.parts)
            case UpdateWeights():
                self._asleep.discard("weights")

    def unload_adapter(self, adapter: bytes) -> None:
        """Forgets an adapter once no request uses it; requests that use it go on."""
        self._engine.unload_adapter(adapter)

    async def describe(self) -> list[tuple[UnfinishedRequest, RequestState | None]]:
        """Returns all unfinished requests, in the order of their arrival, with their states.

        A request without a state is on its way to the engine: its grammar is being compiled, or blocks are being
        fetched.

        Raises:
          UnavailableError: The engine takes no more requests.
          TimeoutError: The engine's step takes longer than DESCRIBE_SECONDS, for example because it waits for a
            compiler.
        """
        self.check_open()
        found = self._loop.create_future()
        self._descriptions.append(found)
        self._engine.describe()
        async with asyncio.timeout(DESCRIBE_SECONDS):
            states = {state.request_id: state for state in await found}
        return [(request, states.get(engine_id)) for engine_id, request in self._requests.items()]

    def fail_all(self, error: Exception) -> None:
        for engine_id, stream in self._streams.items():
            if not stream.ended:
                stream.fail(error)
                self._engine.abort(engine_id)
        for waiting in (*self._loads.values(), *self._changes.values()):
            if not waiting.done():
                waiting.set_exception(error)

    def deliver(self, new: EngineOutputs) -> None:
        if new.states is not None:
            for waiting in self._descriptions:
                if not waiting.done():
                    waiting.set_result(new.states)
            self._descriptions.clear()
        self._end_calls(new)
        # A request whose reader has left no longer has a stream.
        for engine_id, error in new.errors:
            if (stream := self._streams.get(engine_id)) is not None:
                stream.fail(error)
        streams = []
        for output in new.outputs:
            if (stream := self._streams.get(output.request_id)) is not None:
                stream.put(output)
                streams.append(stream)
        for delta in new.deltas:
            if (stream := self._streams.get(delta.request_id)) is not None:
                stream.put_tokens(delta.text, delta.token_ids)
                streams.append(stream)
        self._waker.wake(streams)

    def _interrupt(self, error: BaseException) -> None:
        super()._interrupt(error)
        self._asleep.clear()  # a restarted engine is awake

    def _end_calls(self, new: EngineOutputs) -> None:
        for load in new.loads:
            _end_call(self._loads, load.call_id, load, load.error)
        for done in new.changes:
            _end_call(self._changes, done.call_id, done, done.error)

    def _expire(self, engine_id: str, timeout_seconds: float) -> None:
        stream = self._streams.get(engine_id)
        if stream is not None and not stream.ended:
            stream.fail(DeadlineExceededError(f"the request was aborted: it took longer than {timeout_seconds:g} s"))
            self._engine.abort(engine_id)


Result = TypeVar("Result")


def _end_call(
    calls: Mapping[int, asyncio.Future[Result]], call_id: int, result: Result, error: Exception | None
) -> None:
    waiting = calls.get(call_id)
    if waiting is None or waiting.done():
        return
    if error is not None:
        waiting.set_exception(error)
    else:
        waiting.set_result(result)


def _reason(error: BaseException) -> str:
    return str(error).partition("\n")[0] or type(error).__name__
