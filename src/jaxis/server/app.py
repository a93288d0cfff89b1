"""The application: routes, and what stands before them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware

from jaxis.engine.async_engine import AsyncLLMEngine
from jaxis.server.auth import ApiKeyMiddleware
from jaxis.server.config import ServerConfig
from jaxis.server.context import ServerContext
from jaxis.server.errors import install_error_handlers
from jaxis.server.limits import RequestLimitMiddleware
from jaxis.server.logs import RequestLogMiddleware
from jaxis.server.metrics import ServerMetrics
from jaxis.server.openapi import install_openapi
from jaxis.server.routes import health, openai, tokenize
from jaxis.version import __version__


def create_app(engine: AsyncLLMEngine, config: ServerConfig) -> FastAPI:
    """An ASGI application that serves an engine, which it starts and shuts down.

    Args:
      engine: Not started yet.
      config: How to serve it.
    """
    context = ServerContext(engine, config, ServerMetrics(config.served_model_names[0], engine.stats))

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        engine.start()
        try:
            yield
        finally:
            await engine.shutdown()
            context.workers.shutdown(wait=False, cancel_futures=True)

    # The pages of documentation load scripts from elsewhere: there is only the OpenAPI document.
    app = FastAPI(
        title="jaxis", version=__version__, docs_url=None, redoc_url=None, lifespan=lifespan, redirect_slashes=False
    )
    app.state.context = context
    app.include_router(openai.router)
    app.include_router(tokenize.router)
    app.include_router(health.router)
    install_openapi(app, with_keys=bool(config.api_keys))
    install_error_handlers(app)
    # The one added last stands outermost.
    app.add_middleware(
        RequestLimitMiddleware, max_body_bytes=config.max_body_bytes, timeout_seconds=config.body_timeout_seconds
    )
    if config.api_keys:
        app.add_middleware(ApiKeyMiddleware, api_keys=config.api_keys)
    if config.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=config.allowed_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["Authorization", "Content-Type", "X-Request-Id"],
            expose_headers=["X-Request-Id", "Retry-After"],
        )
    app.add_middleware(RequestLogMiddleware)
    return app
