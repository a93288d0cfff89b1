"""The objects that every route needs: a server's parts, its models, and which of them serves a request."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Literal, Protocol, TypeVar, cast

from fastapi import Depends, Request, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from jaxis.engine.client.async_engine import AsyncEngine, AsyncLLMEngine
from jaxis.errors import EngineError, RequestError
from jaxis.host.threads import SizedExecutor, run_in_daemon
from jaxis.sampling_params import SamplingParams
from jaxis.server.accounting import UsageAccounting
from jaxis.server.config import ServerConfig
from jaxis.server.generation.model_info import ServedModelInfo
from jaxis.server.generation.repeated_prompts import RepeatedPrompts
from jaxis.server.generation.restored_thinking import RestoredThinking
from jaxis.server.generation.served_model import ModelNames, ServedModel
from jaxis.server.http.api_keys import ApiKeys
from jaxis.server.http.ignored_fields import IgnoredFields
from jaxis.server.http.limits import request_bytes
from jaxis.server.http.request_records import RequestLogFile
from jaxis.server.observability.metrics import ModelMetrics, RequestObserver, ServerMetrics
from jaxis.server.openai.stored.store import ResponseStore

if TYPE_CHECKING:
    from jaxis.server.observability.tracing import RequestTracer

Result = TypeVar("Result")
_STACK = "jaxis.until_answered"
Handler = Callable[[Request], Awaitable[Response]]
ModelState = Literal["unloaded", "loading", "loaded", "unloading"]
# For each thread, the largest request that it takes, in bytes: tokenizing takes seconds a megabyte.
_WORKER_BYTES = (64 * 1024, 64 * 1024, 1024 * 1024, math.inf)


@dataclass(frozen=True, kw_only=True)
class ServerParts:
    """What all models of a server share.

    Attributes:
      models: The models.
      config: How the server is set up.
      server_metrics: Its metrics.
      ignored_fields: Names, or refuses, fields of requests that are not applied.
      tracer: Writes a trace of each request; None writes none.
      accounting: Admits requests by the limits of their API keys, and counts what they take.
      keys: The API keys.
      responses: What /v1/responses and /v1/conversations keep; None keeps nothing.
      request_log: Gets a line for every request; None is none.
      thinking: Restores what clients leave out of conversations.
      repeated_prompts: Notices what a KV cache on disk would have kept.
      workers: Threads that render templates and tokenize, which would block the event loop.
      token_counts: Lets a few prompts at once be rendered only to be counted; the others wait.
    """

    models: ServedModels
    config: ServerConfig
    server_metrics: ServerMetrics
    ignored_fields: IgnoredFields
    tracer: RequestTracer | None
    accounting: UsageAccounting
    keys: ApiKeys
    responses: ResponseStore | None = None
    request_log: RequestLogFile | None = None
    thinking: RestoredThinking = field(default_factory=RestoredThinking)
    repeated_prompts: RepeatedPrompts = field(default_factory=RepeatedPrompts)
    workers: SizedExecutor = field(default_factory=lambda: SizedExecutor(_WORKER_BYTES, "jaxis-tokenize"))
    token_counts: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(2))

    def trace(self, operation: str, request_id: str, request: RequestObserver) -> AbstractContextManager[None]:
        """Traces a request, which lasts as long as the block, if there is a tracer."""
        return self.tracer.request(operation, request_id, request) if self.tracer else nullcontext()

    async def run_in_worker(self, function: Callable[[], Result], *, is_quick: bool = False) -> Result:
        """Runs a function in a thread, where large requests do not hold up small ones.

        Args:
          function: What to run.
          is_quick: It takes less than handing it to a thread does.
        """
        if is_quick:
            return function()
        return await asyncio.wrap_future(self.workers.submit(request_bytes(), function))

    async def compile(self, function: Callable[[], Result]) -> Result:
        """Runs a function that waits for grammars to be compiled, which the compiler does in threads of its own."""
        return await asyncio.wrap_future(run_in_daemon(function, "jaxis-compile"))

    def reload(self) -> None:
        """Reads the file of API keys again, and begins a new request log if the old one was renamed."""
        self.keys.reload()
        if self.request_log is not None:
            self.request_log.reopen()

    def close(self) -> None:
        """Ends the threads; queued work is cancelled. Closes the request log and the stored responses."""
        if self.responses is not None:
            self.responses.close()
        if self.request_log is not None:
            self.request_log.close()
        self.workers.shutdown()


@dataclass(frozen=True, kw_only=True)
class ServerContext(ServerParts):
    """A server as the requests for one of its models see it: what all share, and the model's own.

    Attributes:
      config: How the model is served: the server's settings, and the model's own names, parsers and queue.
      engine: Serves the requests.
      model: The model that it serves.
      model_info: What the server tells of it.
      metrics: The model's metrics.
    """

    engine: AsyncEngine
    model: ServedModel
    model_info: ServedModelInfo
    metrics: ModelMetrics

    @property
    def generator(self) -> AsyncLLMEngine:
        """The engine, if it generates.

        Raises:
          RequestError: It does not.
        """
        tasks = self.engine.info.capabilities
        if "completion" not in tasks:
            raise RequestError(
                f"the model {self.model.name!r} generates no text; what it does: {', '.join(tasks)}. See /openapi.json"
            )
        return cast(AsyncLLMEngine, self.engine)


@dataclass(frozen=True)
class KnownModel:
    """What only a loaded model tells of itself; remembered when it is unloaded.

    Attributes:
      default_sampling_params: For what a request leaves out.
      vocab_size: V.
      chat_template: Source of the default one; "" if there is none.
      request_bytes: See `EngineInfo`.
    """

    default_sampling_params: SamplingParams
    vocab_size: int
    chat_template: str
    request_bytes: int

    @classmethod
    def of(cls, context: ServerContext) -> KnownModel:
        """Those of a loaded model."""
        model, tokenizer = context.model, context.model.tokenizer
        template = (tokenizer.default_chat_template if tokenizer else None) or ""
        info = context.engine.info
        return cls(model.default_sampling_params, info.vocab_size, template, info.request_bytes)


@dataclass(frozen=True, kw_only=True)
class ModelEntry:
    """A model in the lists of a server.

    Attributes:
      names: Those that clients may ask for.
      state: Whether it is loaded.
      info: What the server tells of it; of one that was never loaded, only what its files say.
      facts: What more is known of it; None if it was never loaded.
      context: It as requests see it; None if it is not loaded.
      expires: When it is unloaded if nobody asks for it any more; None is never, or unknown.
    """

    names: ModelNames
    state: ModelState
    info: ServedModelInfo
    facts: KnownModel | None
    context: ServerContext | None
    expires: datetime | None = None


class ServedModels(Protocol):
    """The models of a server. Which of them serves a request is asked here only.

    Attributes:
      failure: Why the server cannot go on; None while it can.
      request_bytes: How large a request may have to be, to any model that was loaded; 0 if none needs to be large.
    """

    @property
    def failure(self) -> EngineError | None: ...

    @property
    def request_bytes(self) -> int: ...

    def join(self, parts: ServerParts) -> None:
        """Gives the models what they share; called once, before anything else.

        Raises:
          ConfigError: A setting of a model is invalid.
        """
        ...

    async def start(self) -> None:
        """Begins to serve, in the running event loop."""
        ...

    async def drain(self, deadline_seconds: float) -> None:
        """Stops taking requests, and returns when the running ones have ended, or at the deadline."""
        ...

    async def shutdown(self) -> None:
        """Ends everything."""
        ...

    async def context_of(self, request: Request) -> ServerContext:
        """The model that a request asks for, which stays loaded until the request has been answered.

        Raises:
          ModelNotFoundError: It asks for another one.
          JaxisError: The model cannot be loaded.
        """
        ...

    async def answer(self, request: Request, handler: Handler) -> Response:
        """The answer of a route's handler, within which `context_of` may have to wait."""
        ...

    def entries(self) -> Sequence[ModelEntry]:
        """All models."""
        ...

    def entry(self, name: str | None) -> ModelEntry:
        """The model that a name asks for.

        Raises:
          ModelNotFoundError: There is none.
        """
        ...

    def keep(self, name: str, keep_alive: str | float | None) -> None:
        """Says how long a model stays loaded after its last request, as Ollama's clients do; None is the default."""
        ...

    async def load(self, name: str | None) -> None:
        """Loads a model, if it is not loaded.

        Raises:
          ModelNotFoundError: There is none of this name.
          JaxisError: It cannot be loaded.
        """
        ...

    async def unload(self, name: str | None) -> bool:
        """Unloads a model once its requests have ended; returns whether models can be unloaded.

        Raises:
          ModelNotFoundError: There is none of this name.
        """
        ...

    @property
    def is_making_progress(self) -> bool:
        """Whether there is no reason to start the server again."""
        ...

    @property
    def is_accepting(self) -> bool:
        """Whether new requests are taken."""
        ...


async def get_context(request: Request) -> ServerContext:
    """The model that a request asks for, loaded until it has been answered."""
    # A coroutine, since FastAPI would otherwise run it in a thread for every request.
    return await request.app.state.parts.models.context_of(request)


async def get_parts(request: Request) -> ServerParts:
    """The parts of the application that got the request."""
    return request.app.state.parts


Context = Annotated[ServerContext, Depends(get_context)]
"""The type of a route's parameter that gets the model which a request asks for, in its server."""
Parts = Annotated[ServerParts, Depends(get_parts)]
"""The type of a route's parameter that gets what all models share, and loads none."""


async def check_generates(context: Context) -> None:
    """What routes that generate depend on: raises RequestError if the model that is asked for does not."""
    _ = context.generator


class UntilAnsweredMiddleware:
    """Gives each request a stack of what is to end once it has been answered; see `until_answered`."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with ExitStack() as stack:
            scope[_STACK] = stack
            await self._app(scope, receive, send)


def until_answered(request: Request) -> ExitStack:
    """What ends once a request has been answered, streams included."""
    return request.scope[_STACK]
