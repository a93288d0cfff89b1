"""The engine behind an event loop: another process steps it, and coroutines wait for their outputs.

Only the engine's thread (`EngineThread`), in the engine's process (`EngineProcess`), touches the engine. It takes
commands from a queue, and sends the outputs of a step in one message a step, not one a token. Only the event loop
touches the streams, so neither side needs a lock.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, ParamSpec, Protocol, TypeAlias, TypeVar

import msgspec

from jaxis.engine.client.engine_client import EngineInfo, EngineStats, RequestState
from jaxis.engine.client.output_stream import OutputStream
from jaxis.engine.client.stream_waker import StreamWaker
from jaxis.engine.client.wire import AbortRequest, AddRequest, Call, CancelCall, Command, EngineOutputs
from jaxis.engine.grammar.compiler import GrammarCompiler
from jaxis.errors import DeadlineExceededError, EngineError, OverloadedError, RequestError, UnavailableError
from jaxis.outputs import FIRST_VERSION, RequestOutput
from jaxis.prompts import TokenizedPrompt
from jaxis.sampling_params import SamplingParams

if TYPE_CHECKING:
    from jaxis.engine.grammar.matcher import Grammar
    from jaxis.tokenizer import Tokenizer

JOIN_SECONDS = 10.0
DESCRIBE_SECONDS = 10.0

PauseMode = Literal["abort", "wait", "keep"]
Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
_NamedCall: TypeAlias = tuple[str, Sequence[Any]]
_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class EngineCallbacks:
    """Callbacks of an engine, called in the event loop.

    Attributes:
      deliver: Called with the outputs of a step.
      interrupt: Called with an error when every request is lost and the engine is being started again.
      resume: Called when the engine has been started again.
      fail: Called with the error that ended the engine for good.
    """

    deliver: Callable[[EngineOutputs], None]
    interrupt: Callable[[BaseException], None]
    resume: Callable[[], None]
    fail: Callable[[BaseException], None]


class EngineClient(Protocol):
    """An engine of any kind as seen from an event loop.

    Attributes:
      info: Facts about the engine.
      tokenizer: Tokenizer of the checkpoint; None if it has none.
    """

    info: EngineInfo
    tokenizer: Tokenizer | None

    @property
    def stats(self) -> EngineStats: ...

    def connect(self, loop: asyncio.AbstractEventLoop, callbacks: EngineCallbacks) -> None:
        """Starts delivering outputs to callbacks in the loop. From here on, only the loop's thread may call methods."""
        ...

    def send(self, command: Command) -> None:
        """Sends a command. Commands take effect in their order, but for the time that some need to be prepared."""
        ...

    def stop(self, timeout_seconds: float) -> bool:
        """Ends every request, and the engine's thread or process; returns whether that ended in time.

        May be called from another thread.
        """
        ...

    def is_making_progress(self, stall_seconds: float) -> bool:
        """Returns whether the engine is alive and, if it has work, has recently completed a step."""
        ...


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


class AsyncEngine:
    """Serves coroutines of one event loop with an engine of any kind.

    Call `start` in the loop before anything else, and `shutdown` at the end.

    Attributes:
      info, tokenizer: Facts about the engine, and its tokenizer.
      failure: Error that has ended the engine for good; None while it runs.
      num_reserved: Reserved places: completions that run or wait, including those whose prompts are prepared.
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

    def __init__(self, engine: EngineClient, *, max_sequences: int, stall_seconds: float) -> None:
        self._engine = engine
        self.info = engine.info
        self.tokenizer = engine.tokenizer
        self.max_sequences = max_sequences
        self._stall_seconds = stall_seconds
        self.num_reserved = 0
        self.failure: EngineError | None = None
        self._closed: UnavailableError | None = None
        self._interruption: UnavailableError | None = None
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._num_calls = 0
        self._all_released = asyncio.Event()
        self._all_released.set()

    def fail_all(self, error: Exception) -> None:
        """Ends every request and call with an error."""
        for waiting in self._calls.values():
            if not waiting.done():
                waiting.set_exception(error)

    def deliver(self, new: EngineOutputs) -> None:
        """Hands the outputs of a step to the coroutines that wait for them."""
        for done in new.calls:
            waiting = self._calls.pop(done.call_id, None)
            if waiting is None or waiting.done():
                continue
            if done.failure is None:
                waiting.set_result(done.value)
            else:
                waiting.set_exception(done.failure.error())

    async def call(self, name: str, *arguments: Any, returns: type[Result]) -> Result:
        """Calls a function of the engine, which runs it between two steps, and returns its result.

        Cancelling drops a call whose result the engine computes in several steps.

        Args:
          name: Name of the function in the engine's table of calls.
          *arguments: Its arguments.
          returns: Type of its result.

        Raises:
          JaxisError: The function's error.
          UnavailableError: The engine takes no more requests, or was shut down meanwhile.
        """
        self.check_open()
        return msgspec.convert(await self._start_call(name, arguments), returns)

    def _start_call(self, name: str, arguments: Sequence[Any] = (), *, waits: bool = False) -> asyncio.Future[Any]:
        self._num_calls += 1
        call_id, waiting = self._num_calls, self._loop.create_future()
        self._calls[call_id] = waiting
        waiting.add_done_callback(functools.partial(self._end_call, call_id))
        self._engine.send(Call(call_id, name, list(arguments), waits))
        return waiting

    def _end_call(self, call_id: int, waiting: asyncio.Future[Any]) -> None:
        if self._calls.pop(call_id, None) is not None:  # the engine has not ended it
            self._engine.send(CancelCall(call_id))
        if not waiting.cancelled():
            waiting.exception()  # some callers do not wait for it

    def check_open(self) -> None:
        """Raises UnavailableError if the engine takes no more requests."""
        if self._closed is not None:
            raise self._closed

    def start(self) -> None:
        """Starts the engine; its outputs go to the running event loop."""
        self._loop = asyncio.get_running_loop()
        callbacks = EngineCallbacks(self.deliver, self._interrupt, self._resume, self._fail)
        self._engine.connect(self._loop, callbacks)

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
        if self.num_reserved + num_sequences > self.max_sequences:
            raise OverloadedError(f"the server is busy with {self.num_reserved} {self.unit}: try again later")
        self.num_reserved += num_sequences
        self._all_released.clear()
        try:
            yield
        finally:
            self.num_reserved -= num_sequences
            if self.num_reserved == 0:
                self._all_released.set()

    @property
    def is_making_progress(self) -> bool:
        """True if the engine is alive and, if it has work, has recently completed a step or is compiling one."""
        return self._closed is None and self._engine.is_making_progress(self._stall_seconds)

    @property
    def is_accepting(self) -> bool:
        return self._closed is None

    def stats(self) -> EngineStats:
        """Returns the state of the engine after a recent step."""
        return self._engine.stats

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
        if not await asyncio.to_thread(self._engine.stop, JOIN_SECONDS):
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


def _to_its_end(change: Callable[Arguments, Coroutine[Any, Any, None]]) -> Callable[Arguments, Awaitable[None]]:
    """Makes a change of the engine complete even if the caller is cancelled. An impossible one raises JaxisError."""

    @functools.wraps(change)
    async def run(*arguments: Arguments.args, **named: Arguments.kwargs) -> None:
        await asyncio.shield(asyncio.ensure_future(change(*arguments, **named)))

    return run


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
        self.grammar_compiler = GrammarCompiler(self.tokenizer, self.info.vocab_size, self.info.eos_token_ids)
        self.grammar_compiler.prepare()
        # A client may reuse the id of a request that was aborted. The engine's own ids are never reused, so late
        # outputs of the first request cannot reach the second.
        self._streams: dict[str, OutputStream] = {}  # by the engine's ids
        self._requests: dict[str, UnfinishedRequest] = {}  # likewise
        self._engine_ids: dict[str, str] = {}  # by the requests' own ids
        self._num_requests = 0
        self._repeated: dict[Hashable, _NamedCall] = {}  # what an engine that was started again is to be told
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
        self._engine.send(AddRequest(engine_id, prompt, params, priority, client, final_only).with_grammar(grammar))
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
                self._engine.send(AbortRequest(engine_id))

    def abort(self, request_id: str) -> None:
        """Ends a request if it is unfinished: its reader gets a last output, with finish_reason "abort"."""
        if request_id in self._engine_ids:
            self._engine.send(AbortRequest(self._engine_ids[request_id]))

    def reset_prefix_cache(self) -> None:
        super().reset_prefix_cache()
        self._start_call("reset_prefix_cache")

    async def load_adapter(self, source: str) -> tuple[bytes, str | None]:
        """Loads an adapter from a folder; returns its digest, which prompts name it by, and its chat template.

        Raises:
          JaxisError: The adapter cannot be loaded.
          UnavailableError: The engine takes no more requests, or was shut down meanwhile.
        """
        digest, chat_template = await self.call("load_adapter", source, returns=tuple[bytes, str | None])
        self._repeated[digest] = "load_adapter", [source]
        return digest, chat_template

    def unload_adapter(self, adapter: bytes) -> None:
        """Forgets an adapter once no request uses it; requests that use it go on."""
        self._repeated.pop(adapter, None)
        self._start_call("unload_adapter", [adapter])

    @property
    def is_asleep(self) -> bool:
        """True if the engine sleeps, and requests wait."""
        return bool(self._asleep)

    @_to_its_end
    async def pause(self, mode: PauseMode) -> None:
        """Stops running requests until `resume`; new requests wait.

        Args:
          mode: Treatment of running requests. "abort" ends them, "wait" pauses when they have ended, "keep" lets them
            go on after the pause.
        """
        await self.call("pause", mode, returns=type(None))
        self._repeated["pause"] = "pause", [mode]
        self.is_paused = True

    @_to_its_end
    async def resume(self) -> None:
        """Lets requests run again."""
        await self.call("resume", returns=type(None))
        self._repeated.pop("pause", None)
        self.is_paused = False

    @_to_its_end
    async def sleep(self, level: int) -> None:
        """Frees the caches and the device memory of the weights, as `LiveWeights.sleep` does."""
        await self.call("sleep", level, returns=type(None))
        self._asleep = {"weights", "kv_cache"}

    @_to_its_end
    async def wake_up(self, parts: Sequence[str] | None) -> None:
        """Restores weights and caches after `sleep`, as `LiveWeights.wake_up` does."""
        await self._change_weights("wake_up", parts)
        self._asleep -= self._asleep if parts is None else set(parts)

    @_to_its_end
    async def update_weights(self, folder: str, version: str | int | None) -> None:
        """Gives the model the weights of a folder, as `LiveWeights.update` does."""
        # Weights are read while steps run. The lock keeps updates in the order of their calls.
        async with self._updates:
            await self._change_weights("update_weights", folder, version)
        self._repeated["weights"] = "update_weights", [folder, self.weights_version]
        self._asleep.discard("weights")

    async def _change_weights(self, name: str, *arguments: Any) -> None:
        fingerprint, self.weights_version = await self.call(name, *arguments, returns=tuple[str, str | int])
        self.info = dataclasses.replace(self.info, fingerprint=fingerprint)

    async def describe(self) -> list[tuple[UnfinishedRequest, RequestState | None]]:
        """Returns all unfinished requests, in the order of their arrival, with their states.

        A request without a state is on its way to the engine: its grammar is being compiled, or blocks are being
        fetched.

        Raises:
          UnavailableError: The engine takes no more requests.
          TimeoutError: The engine's step takes longer than DESCRIBE_SECONDS, for example because it waits for a
            compiler.
        """
        async with asyncio.timeout(DESCRIBE_SECONDS):
            found = await self.call("describe", returns=list[RequestState])
        states = {state.request_id: state for state in found}
        return [(request, states.get(engine_id)) for engine_id, request in self._requests.items()]

    def fail_all(self, error: Exception) -> None:
        for engine_id, stream in self._streams.items():
            if not stream.ended:
                stream.fail(error)
                self._engine.send(AbortRequest(engine_id))
        super().fail_all(error)

    def deliver(self, new: EngineOutputs) -> None:
        super().deliver(new)
        # A request whose reader has left no longer has a stream.
        for engine_id, failure in new.errors:
            if (stream := self._streams.get(engine_id)) is not None:
                stream.fail(failure.error())
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

    def _resume(self) -> None:
        for name, arguments in self._repeated.values():
            done = self._start_call(name, arguments, waits=True)
            if name == "update_weights":
                done.add_done_callback(self._end_repeated_update)
        super()._resume()

    def _end_repeated_update(self, done: asyncio.Future[Any]) -> None:
        error = done.exception()
        if error is not None and not isinstance(error, UnavailableError):  # the engine is lost again
            self._fail(EngineError(f"its weights could not be loaded again: {error}"))

    def _expire(self, engine_id: str, timeout_seconds: float) -> None:
        stream = self._streams.get(engine_id)
        if stream is not None and not stream.ended:
            stream.fail(DeadlineExceededError(f"the request was aborted: it took longer than {timeout_seconds:g} s"))
            self._engine.send(AbortRequest(engine_id))


def _reason(error: BaseException) -> str:
    return str(error).partition("\n")[0] or type(error).__name__
