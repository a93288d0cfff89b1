"""The engine behind an event loop: another process steps it, and coroutines wait for their outputs.

Only the engine's thread (`EngineThread`), in the engine's process (`EngineProcess`), touches the engine. It takes
commands from a queue, and sends the outputs of a step in one message a step, not one a token. Only the event loop
touches the streams, so neither side needs a lock.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar

import msgspec

from jaxis.engine.client.engine_client import EngineInfo, EngineStats, RequestState
from jaxis.engine.client.wire import Call, CancelCall, Command, EngineOutputs
from jaxis.errors import EngineError, OverloadedError, RequestError, UnavailableError

if TYPE_CHECKING:
    from jaxis.engine.grammar.compiler import GrammarCompiler
    from jaxis.tokenizer import Tokenizer

JOIN_SECONDS = 10.0

Result = TypeVar("Result")
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
class RepeatedCall:
    """A call that is made again to an engine that was started again.

    Attributes:
      name: Name of the function.
      arguments: Its arguments.
      is_vital: True if the engine has failed where the call fails.
    """

    name: str
    arguments: Sequence[Any]
    is_vital: bool


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
      num_restarts: Times that the engine was started again.
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
        self.num_restarts = 0
        self._repeated: dict[Hashable, RepeatedCall] = {}
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
        return msgspec.convert(await self.start_call(name, *arguments), returns)

    def start_call(self, name: str, *arguments: Any, waits: bool = False) -> asyncio.Future[Any]:
        """Calls a function as `call` does, and returns a future of its result; `waits` is that of `Call`."""
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

    def repeat(self, key: Hashable, name: str, *arguments: Any, is_vital: bool = False) -> None:
        """Notes a call to make again to an engine that was started again, in place of an earlier one with this key."""
        self._repeated[key] = RepeatedCall(name, arguments, is_vital)

    def do_not_repeat(self, key: Hashable) -> None:
        """Forgets the call that was noted under a key, if any."""
        self._repeated.pop(key, None)

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
        self.num_restarts += 1
        for call in self._repeated.values():
            done = self.start_call(call.name, *call.arguments, waits=True)
            if call.is_vital:
                done.add_done_callback(functools.partial(self._end_vital, call.name))
        if self._closed is self._interruption:
            self._closed = None

    def _end_vital(self, name: str, done: asyncio.Future[Any]) -> None:
        error = done.exception()
        if error is not None and not isinstance(error, UnavailableError):  # the engine is lost again
            self._fail(EngineError(f"{name} failed when it was started again: {error}"))

    def _fail(self, error: BaseException) -> None:
        self.failure = EngineError(f"the engine has failed and must be restarted: {_reason(error)}")
        self._closed = UnavailableError(str(self.failure))
        self.fail_all(self._closed)


def _reason(error: BaseException) -> str:
    return str(error).partition("\n")[0] or type(error).__name__
