"""The ASGI application, with its routes and middleware."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager

from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from jaxis.engine.client.async_engine import AsyncEngine
from jaxis.server.accounting import KeyMetrics, UsageAccounting
from jaxis.server.config import BODY_BYTES, ServerConfig
from jaxis.server.context import ServedModels, ServerParts, UntilAnsweredMiddleware
from jaxis.server.generation.restored_thinking import RestoredThinking
from jaxis.server.http.api_keys import OPEN_PATHS, ApiKeyMiddleware, ApiKeys
from jaxis.server.http.errors import install_error_handlers
from jaxis.server.http.hosts import AllowedHostMiddleware, HostMiddleware
from jaxis.server.http.ignored_fields import HEADER, IgnoredFields
from jaxis.server.http.limits import RequestLimitMiddleware
from jaxis.server.http.openapi import install_openapi
from jaxis.server.http.request_log import QUIET_PATHS, RequestLogMiddleware
from jaxis.server.http.request_records import RequestLogFile, RequestRecordMiddleware
from jaxis.server.observability.metrics import ServerMetrics
from jaxis.server.one_model import OneModel
from jaxis.server.protocol import Protocol, protocols
from jaxis.server.routes.chat_page import add_chat_page, add_greeting, chat_page_paths
from jaxis.version import __version__


def create_app(engine: AsyncEngine, config: ServerConfig) -> FastAPI:
    """Makes an ASGI application that serves an engine. The application starts the engine and shuts it down.

    Raises:
      ConfigError: A parser does not exist.
    """
    return create_models_app(OneModel(engine, config), config)


def create_models_app(models: ServedModels, config: ServerConfig) -> FastAPI:
    """Makes an ASGI application for all models of a server. The application starts them and shuts them down.

    Raises:
      ConfigError: A setting of a model is invalid.
    """
    tracer = None
    if config.otlp_traces_endpoint is not None:
        from jaxis.server.observability.tracing import TraceContextMiddleware, make_tracer

        tracer = make_tracer(config.otlp_traces_endpoint, config.served_model_names[0])
    metrics = ServerMetrics()
    keys = ApiKeys(config.api_keys, config.api_key_file)
    log = None if config.request_log is None else RequestLogFile(config.request_log)
    parts = ServerParts(
        models=models,
        config=config,
        server_metrics=metrics,
        ignored_fields=IgnoredFields(strict=config.strict_fields),
        tracer=tracer,
        accounting=UsageAccounting(KeyMetrics(metrics.registry, config.metrics_prefix)),
        keys=keys,
        request_log=log,
        thinking=RestoredThinking() if config.restore_thinking else RestoredThinking(max_answers=0),
    )
    models.join(parts)
    stack = ExitStack()
    stack.callback(parts.close)

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        await models.start()
        try:
            yield
        finally:
            await models.shutdown()
            stack.close()
            if tracer is not None:
                await asyncio.to_thread(tracer.shutdown)

    # Only the OpenAPI document: the documentation pages would load scripts from elsewhere.
    app = FastAPI(
        title="jaxis", version=__version__, docs_url=None, redoc_url=None, lifespan=lifespan, redirect_slashes=False
    )
    app.state.parts = parts
    spoken = protocols()
    _add_protocols(app, config, spoken, stack)
    page_paths = chat_page_paths() if config.webui else frozenset()
    install_openapi(app, with_keys=bool(keys))
    app.add_middleware(UntilAnsweredMiddleware)
    install_error_handlers(app)
    # The middleware added last is outermost.
    if tracer is not None:
        app.add_middleware(TraceContextMiddleware)

    def max_body_bytes() -> int:
        return max(BODY_BYTES, models.request_bytes) if config.max_body_bytes is None else config.max_body_bytes

    app.add_middleware(
        RequestLimitMiddleware, max_body_bytes=max_body_bytes, timeout_seconds=config.body_timeout_seconds
    )
    quiet_paths = QUIET_PATHS | page_paths
    if log is not None:
        app.add_middleware(RequestRecordMiddleware, log=log, level=config.request_log_level, quiet_paths=quiet_paths)
    if keys:
        app.add_middleware(ApiKeyMiddleware, keys=keys, open_paths=OPEN_PATHS | page_paths)
    if config.only_allowed_hosts:
        app.add_middleware(AllowedHostMiddleware, hosts=config.allowed_hosts)
    if config.allowed_origins:
        _add_cors(app, config, spoken)
    app.add_middleware(HostMiddleware)
    app.add_middleware(MethodMiddleware)
    app.add_middleware(RequestLogMiddleware, quiet_paths=quiet_paths, on_response=metrics.http_response)
    return app


def _add_cors(app: FastAPI, config: ServerConfig, spoken: Sequence[Protocol]) -> None:
    sent = [header for protocol in spoken for header in protocol.browser_headers]
    read = [header for protocol in spoken for errors in protocol.errors for header in errors.request_id_headers]
    app.add_middleware(
        CORSMiddleware,
        allow_origins=config.allowed_origins,
        allow_methods=["GET", "POST", "HEAD", "DELETE"],
        allow_headers=["Authorization", "Content-Type", "X-Request-Id", *sent],
        expose_headers=["X-Request-Id", "Retry-After", *read, HEADER],
    )


class MethodMiddleware:
    """Lets the application answer HEAD as GET, and the OPTIONS of a load balancer's health check.

    uvicorn, which still sees a HEAD, leaves out the body. HAProxy checks by `OPTIONS / HTTP/1.0` unless told otherwise.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        method = scope["method"] if scope["type"] == "http" else ""
        is_check = method == "OPTIONS" and scope["path"] in (OPEN_PATHS | {"/"}) and not _is_preflight(scope)
        if method != "HEAD" and not is_check:
            await self._app(scope, receive, send)
            return
        inner = {**scope, "method": "GET"}
        if is_check and scope["path"] == "/":
            inner["path"] = "/health"
        try:
            await self._app(inner, receive, send)
        finally:
            if "route" in inner:  # the log and the metrics, which are outside, read it
                scope["route"] = inner["route"]


def _is_preflight(scope: Scope) -> bool:
    return any(name == b"origin" for name, _ in scope["headers"])


def _add_protocols(app: FastAPI, config: ServerConfig, spoken: Sequence[Protocol], stack: ExitStack) -> None:
    app.state.error_dialects = [errors for protocol in spoken for errors in protocol.errors]
    for protocol in spoken:
        protocol.attach(app.state, config, stack)
    app.state.routes = []
    served = [protocol for protocol in spoken if protocol.is_on(config)]
    for router in (router for protocol in served for router in protocol.routers):
        app.include_router(router)
        app.state.routes += router.routes
    greeting = next((protocol.greeting for protocol in served if protocol.greeting), "")
    if config.webui:
        add_chat_page(app, greeting)
    elif greeting:
        add_greeting(app, greeting)
