"""Objects that every route needs: a server's parts, its models, and the model that serves a request."""

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

from jaxis.engine.client.async_engine import AsyncEngine
from jaxis.engine.client.async_llm_engine import AsyncLLMEngine
from jaxis.engine.embedded_inputs.info import InputInfo
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

if TYPE_CHECKING:
    from jaxis.server.observability.tracing import RequestTracer

Result = TypeVar("Result")
_STACK = "jaxis.until_answered"
Handler = Callable[[Request], Awaitable[Response]]
ModelState = Literal["unloaded", "loading", "loaded", "unloading"]
# Largest request in bytes of each thread: tokenizing takes seconds per megabyte.
_WORKER_BYTES = (64 * 1024, 64 * 1024, 1024 * 1024, math.inf)


@dataclass(frozen=True, kw_only=True)
class ServerParts:
    """Parts of a server that all its models share.

    Attributes:
      ignored_fields: Check of the requests' fields that are not applied.
      tracer: Tracer of requests; None for no traces.
      accounting: Admission of requests by the limits of their API keys, and counts of their tokens.
      request_log: File with a line for every request; None for no file.
      thinking: Restoration of thinking that clients leave out of conversations.
      repeated_prompts: Detection of prompts that a KV cache on disk would have kept.
      workers: Threads that render templates and tokenize, which would block the event loop.
      token_counts: Limit on prompts that are rendered at the same time only to be counted.
    """

    models: ServedModels
    config: ServerConfig
    server_metrics: ServerMetrics
    ignored_fields: IgnoredFields
    tracer: RequestTracer | None
    accounting: UsageAccounting
    keys: ApiKeys
    request_log: RequestLogFile | None = None
    thinking: RestoredThinking = field(default_factory=RestoredThinking)
    repeated_prompts: RepeatedPrompts = field(default_factory=RepeatedPrompts)
    workers: SizedExecutor = field(default_factory=lambda: SizedExecutor(_WORKER_BYTES, "jaxis-tokenize"))
    token_counts: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(2))

    def trace(self, operation: str, request_id: str, request: RequestObserver) -> AbstractContextManager[None]:
        """Traces a request, which lasts as long as the `with` block, if there is a tracer."""
        return self.tracer.request(operation, request_id, request) if self.tracer else nullcontext()

    async def run_in_worker(self, function: Callable[[], Result], *, is_quick: bool = False) -> Result:
        """Runs a function in a thread. Large requests do not delay small ones.

        Args:
          function: Function to run.
          is_quick: True if the function takes less time than handing it to a thread; it then runs at once.
        """
        if is_quick:
            return function()
        return await asyncio.wrap_future(self.workers.submit(request_bytes(), function))

    async def compile(self, function: Callable[[], Result]) -> Result:
        """Runs a function that waits for grammars to be compiled, which the compiler does in threads of its own."""
        return await asyncio.wrap_future(run_in_daemon(function, "jaxis-compile"))

    def reload(self) -> None:
        """Reads the file of API keys again, and opens a new request log if the old one was renamed."""
        self.keys.reload()
        if self.request_log is not None:
            self.request_log.reopen()

    def close(self) -> None:
        """Ends the threads, cancels queued work, and closes the request log."""
        if self.request_log is not None:
            self.request_log.close()
        self.workers.shutdown()


@dataclass(frozen=True, kw_only=True)
class ServerContext(ServerParts):
    """A server as the requests for one of its models see it: the shared parts, and the model's own.

    Attributes:
      config: The server's settings, with the model's own names, parsers and queue.
      model_info: Facts of the model for clients.
    """

    engine: AsyncEngine
    model: ServedModel
    model_info: ServedModelInfo
    metrics: ModelMetrics

    @property
    def generator(self) -> AsyncLLMEngine:
        """The engine, as one that generates.

        Raises:
          RequestError: The engine does not generate.
        """
        tasks = self.engine.info.capabilities
        if "completion" not in tasks:
            raise RequestError(
                f"the model {self.model.name!r} generates no text; what it does: {', '.join(tasks)}. See /openapi.json"
            )
        return cast(AsyncLLMEngine, self.engine)


@dataclass(frozen=True)
class KnownModel:
    """Facts of a model that only the loaded model knows; they are kept after it is unloaded.

    Attributes:
      default_sampling_params: Defaults of the requests' parameters.
      vocab_size: Size of the vocabulary, V.
      chat_template: Source of the default chat template; "" if there is none.
      request_bytes: Largest request body that the model needs; see `InputInfo`.
    """

    default_sampling_params: SamplingParams
    vocab_size: int
    chat_template: str
    request_bytes: int

    @classmethod
    def of(cls, context: ServerContext) -> KnownModel:
        """Returns the facts of a loaded model."""
        model, tokenizer = context.model, context.model.tokenizer
        template = (tokenizer.default_chat_template if tokenizer else None) or ""
        info = context.engine.info
        return cls(model.default_sampling_params, info.vocab_size, template, InputInfo.of(info.features).request_bytes)


@dataclass(frozen=True, kw_only=True)
class ModelEntry:
    """A model in the lists of a server.

    Attributes:
      names: Names by which clients may ask for it.
      info: Facts for clients; for a model that was never loaded, only those of its files.
      facts: Facts of the loaded model; None if it was never loaded.
      context: Its context for requests; None if it is not loaded.
      expires: Time at which it is unloaded if no request asks for it; None for never or unknown.
    """

    names: ModelNames
    state: ModelState
    info: ServedModelInfo
    facts: KnownModel | None
    context: ServerContext | None
    expires: datetime | None = None


class ServedModels(Protocol):
    """The models of a server, and the choice of the model that serves a request.

    Attributes:
      failure: Reason why the server cannot continue; None while it can.
      request_bytes: Largest request body that any loaded model needs; 0 if none needs large ones.
    """

    @property
    def failure(self) -> EngineError | None: ...

    @property
    def request_bytes(self) -> int: ...

    @property
    def only_context(self) -> ServerContext | None:
        """Context of a model that is the only one and always loaded; None for others, which requests load."""
        return None

    def renew_fingerprint(self) -> None:
        """Makes later answers carry the current fingerprint of the engine of `only_context`."""

    def join(self, parts: ServerParts) -> None:
        """Gives the models their shared parts. It is called once, before anything else.

        Raises:
          ConfigError: A setting of a model is invalid.
        """
        ...

    async def start(self) -> None:
        """Starts to serve, in the running event loop."""
        ...

    async def drain(self, deadline_seconds: float) -> None:
        """Stops taking requests. Returns when the running ones have ended, or at the deadline."""
        ...

    async def shutdown(self) -> None:
        """Ends all engines."""
        ...

    async def context_of(self, request: Request) -> ServerContext:
        """Returns the context of the model that a request asks for. The model stays loaded until the request is
        answered.

        Raises:
          ModelNotFoundError: No model has the requested name.
          JaxisError: The model cannot be loaded.
        """
        ...

    async def answer(self, request: Request, handler: Handler) -> Response:
        """Returns the answer of a route's handler, within which `context_of` may have to wait."""
        ...

    def entries(self) -> Sequence[ModelEntry]:
        """Returns the entries of all models."""
        ...

    def entry(self, name: str | None) -> ModelEntry:
        """Returns the entry of the model with this name.

        Raises:
          ModelNotFoundError: No model has this name.
        """
        ...

    def keep(self, name: str, keep_alive: str | float | None) -> None:
        """Sets the time that a model stays loaded after its last request, as in Ollama; None for the default."""
        ...

    async def load(self, name: str | None) -> None:
        """Loads a model unless it is loaded.

        Raises:
          ModelNotFoundError: No model has this name.
          JaxisError: The model cannot be loaded.
        """
        ...

    async def unload(self, name: str | None) -> bool:
        """Unloads a model once its requests have ended. Returns whether models can be unloaded.

        Raises:
          ModelNotFoundError: No model has this name.
        """
        ...

    @property
    def is_making_progress(self) -> bool:
        """False if the server should be restarted."""
        ...

    @property
    def is_accepting(self) -> bool:
        """True if new requests are taken."""
        ...


async def get_context(request: Request) -> ServerContext:
    """Returns the context of the model that a request asks for, loaded until the request is answered."""
    # It is a coroutine, since FastAPI would otherwise run it in a thread for every request.
    return await request.app.state.parts.models.context_of(request)


async def get_parts(request: Request) -> ServerParts:
    return request.app.state.parts


Context = Annotated[ServerContext, Depends(get_context)]
"""Type of a route's parameter for the context of the requested model."""
Parts = Annotated[ServerParts, Depends(get_parts)]
"""Type of a route's parameter for the server's shared parts, which loads no model."""


async def check_generates(context: Context) -> None:
    """Raises RequestError if the requested model does not generate; a dependency of routes that generate."""
    _ = context.generator


class UntilAnsweredMiddleware:
    """Gives each request the stack of `until_answered`, and closes it after the answer."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with ExitStack() as stack:
            scope[_STACK] = stack
            await self._app(scope, receive, send)


def until_answered(request: Request) -> ExitStack:
    """Returns a stack of contexts that end once a request has been answered, streams included."""
    return request.scope[_STACK]
