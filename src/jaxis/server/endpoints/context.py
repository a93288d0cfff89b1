"""The objects that every route needs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from fastapi import Request

from jaxis.engine.frontend.async_engine import AsyncLLMEngine
from jaxis.server.config import ServerConfig
from jaxis.server.endpoints.served_model import ServedModel
from jaxis.server.observability.metrics import RequestObserver, ServerMetrics

if TYPE_CHECKING:
    from jaxis.server.observability.tracing import RequestTracer

Result = TypeVar("Result")


@dataclass(frozen=True)
class ServerContext:
    """One server's parts.

    Attributes:
      engine: Serves the requests.
      model: The model that it serves.
      config: How the server is set up.
      metrics: The server's metrics.
      tracer: Writes a trace of each request; None writes none.
      workers: Threads that render templates and tokenize, which would block the event loop.
      compilers: Threads that compile grammars, which takes longer and would block `workers`.
    """

    engine: AsyncLLMEngine
    model: ServedModel
    config: ServerConfig
    metrics: ServerMetrics
    tracer: RequestTracer | None = None
    workers: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(4, "jaxis-preprocess"))
    compilers: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(2, "jaxis-compile"))

    def trace(self, operation: str, request_id: str, request: RequestObserver) -> AbstractContextManager[None]:
        """Traces a request, which lasts as long as the block, if there is a tracer."""
        return self.tracer.request(operation, request_id, request) if self.tracer else nullcontext()

    async def preprocess(self, function: Callable[[], Result]) -> Result:
        """Runs a function that takes milliseconds in a thread."""
        return await asyncio.get_running_loop().run_in_executor(self.workers, function)

    async def compile(self, function: Callable[[], Result]) -> Result:
        """Runs a function that may take seconds in a thread."""
        return await asyncio.get_running_loop().run_in_executor(self.compilers, function)

    def close(self) -> None:
        """Ends the threads; queued work is cancelled."""
        for executor in (self.workers, self.compilers):
            executor.shutdown(wait=False, cancel_futures=True)


async def get_context(request: Request) -> ServerContext:
    """The context of the application that got the request."""
    # A coroutine, since FastAPI would otherwise run it in a thread for every request.
    return request.app.state.context
