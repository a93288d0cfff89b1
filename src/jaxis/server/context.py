"""The objects that every route needs."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, TypeVar

from fastapi import Depends, Request

from jaxis.engine.frontend.async_engine import AsyncLLMEngine
from jaxis.host.threads import SizedExecutor, run_in_daemon
from jaxis.server.accounting import UsageAccounting
from jaxis.server.config import ServerConfig
from jaxis.server.generation.model_info import ServedModelInfo
from jaxis.server.generation.served_model import ServedModel
from jaxis.server.http.api_keys import ApiKeys
from jaxis.server.http.ignored_fields import IgnoredFields
from jaxis.server.http.limits import request_bytes
from jaxis.server.http.request_records import RequestLogFile
from jaxis.server.observability.metrics import RequestObserver, ServerMetrics

if TYPE_CHECKING:
    from jaxis.server.observability.tracing import RequestTracer

Result = TypeVar("Result")
# For each thread, the largest request that it takes, in bytes: tokenizing takes seconds a megabyte.
_WORKER_BYTES = (64 * 1024, 64 * 1024, 1024 * 1024, math.inf)


@dataclass(frozen=True)
class ServerContext:
    """One server's parts.

    Attributes:
      engine: Serves the requests.
      model: The model that it serves.
      model_info: What the server tells of it.
      config: How the server is set up.
      metrics: The server's metrics.
      ignored_fields: Names, or refuses, fields of requests that are not applied.
      tracer: Writes a trace of each request; None writes none.
      accounting: Admits requests by the limits of their API keys, and counts what they take.
      keys: The API keys.
      request_log: Gets a line for every request; None is none.
      workers: Threads that render templates and tokenize, which would block the event loop.
      token_counts: Lets a few prompts at once be rendered only to be counted; the others wait.
    """

    engine: AsyncLLMEngine
    model: ServedModel
    model_info: ServedModelInfo
    config: ServerConfig
    metrics: ServerMetrics
    ignored_fields: IgnoredFields
    tracer: RequestTracer | None
    accounting: UsageAccounting
    keys: ApiKeys
    request_log: RequestLogFile | None = None
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
        """Ends the threads; queued work is cancelled. Closes the request log."""
        if self.request_log is not None:
            self.request_log.close()
        self.workers.shutdown()


async def get_context(request: Request) -> ServerContext:
    """The context of the application that got the request."""
    # A coroutine, since FastAPI would otherwise run it in a thread for every request.
    return request.app.state.context


Context = Annotated[ServerContext, Depends(get_context)]
"""The type of a route's parameter that gets the context."""
