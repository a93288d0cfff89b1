"""What the routes work with."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

from fastapi import Request

from jaxis.engine.async_engine import AsyncLLMEngine
from jaxis.server.config import ServerConfig
from jaxis.server.errors import ModelNotFoundError
from jaxis.server.metrics import ServerMetrics

Result = TypeVar("Result")


@dataclass(frozen=True)
class ServerContext:
    """One server's parts.

    Attributes:
      engine: Serves the requests.
      config: How the server is set up.
      metrics: Counts what happens.
      workers: Threads for templates and tokenizers, which would hold up the event loop.
    """

    engine: AsyncLLMEngine
    config: ServerConfig
    metrics: ServerMetrics
    workers: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(4, "jaxis-preprocess"))

    @property
    def model_name(self) -> str:
        """The name that answers carry."""
        return self.config.served_model_names[0]

    def check_model(self, name: str | None) -> None:
        """Raises ModelNotFoundError if a request asks for another model."""
        if name is not None and name not in self.config.served_model_names:
            served = ", ".join(self.config.served_model_names)
            raise ModelNotFoundError(f"the model {name[:200]!r} is not served here; there is: {served}")

    async def preprocess(self, function: Callable[[], Result]) -> Result:
        """Runs a function in a thread."""
        return await asyncio.get_running_loop().run_in_executor(self.workers, function)


async def get_context(request: Request) -> ServerContext:
    """The context of the application that got the request."""
    # A coroutine, or FastAPI would run it in a thread for every request.
    return request.app.state.context
