"""The engine that generates, behind an event loop: each request is a stream of outputs."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from typing import TYPE_CHECKING, Any, Literal, ParamSpec

from jaxis.engine.client.async_engine import AsyncEngine, EngineClient, UnfinishedRequest
from jaxis.engine.client.engine_client import RequestState
from jaxis.engine.client.output_stream import OutputStream
from jaxis.engine.client.stream_waker import StreamWaker
from jaxis.engine.client.wire import AbortRequest, AddRequest, EngineOutputs
from jaxis.engine.grammar.compiler import GrammarCompiler
from jaxis.engine.grammar.recipe import GrammarRecipe
from jaxis.errors import DeadlineExceededError, RequestError
from jaxis.outputs import RequestOutput
from jaxis.prompts import TokenizedPrompt
from jaxis.sampling_params import SamplingParams

if TYPE_CHECKING:
    from jaxis.engine.grammar.matcher import Grammar

DESCRIBE_SECONDS = 10.0

PauseMode = Literal["abort", "wait", "keep"]
Arguments = ParamSpec("Arguments")


def to_its_end(change: Callable[Arguments, Coroutine[Any, Any, None]]) -> Callable[Arguments, Awaitable[None]]:
    """Makes a change of the engine complete even if the caller is cancelled. An impossible one raises JaxisError."""

    @functools.wraps(change)
    async def run(*arguments: Arguments.args, **named: Arguments.kwargs) -> None:
        await asyncio.shield(asyncio.ensure_future(change(*arguments, **named)))

    return run


class AsyncLLMEngine(AsyncEngine):
    """The `AsyncEngine` of an engine that generates.

    Attributes:
      is_paused: True if requests wait for `resume`.

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
        self.is_paused = False

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
          grammar: Grammar of `params`, made with the engine's `grammar_compiler` on another thread.

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
        recipe = GrammarRecipe.of(params, grammar)
        self._engine.send(AddRequest(engine_id, prompt, params, priority, client, final_only, recipe))
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
        self.start_call("reset_prefix_cache")

    @to_its_end
    async def pause(self, mode: PauseMode) -> None:
        """Stops running requests until `resume`; new requests wait.

        Args:
          mode: Treatment of running requests. "abort" ends them, "wait" pauses when they have ended, "keep" lets them
            go on after the pause.
        """
        await self.call("pause", mode, returns=type(None))
        self.repeat("pause", "pause", mode)
        self.is_paused = True

    @to_its_end
    async def resume(self) -> None:
        """Lets requests run again."""
        await self.call("resume", returns=type(None))
        self.do_not_repeat("pause")
        self.is_paused = False

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

    def _expire(self, engine_id: str, timeout_seconds: float) -> None:
        stream = self._streams.get(engine_id)
        if stream is not None and not stream.ended:
            stream.fail(DeadlineExceededError(f"the request was aborted: it took longer than {timeout_seconds:g} s"))
            self._engine.send(AbortRequest(engine_id))
