"""The application: its routes and middleware."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware

from jaxis.engine.frontend.async_engine import AsyncLLMEngine
from jaxis.parsing.model_parsers import ModelParsers
from jaxis.server.config import ServerConfig
from jaxis.server.endpoints.context import ServerContext
from jaxis.server.endpoints.ignored_fields import HEADER, IgnoredFields
from jaxis.server.endpoints.model_facts import ServedModelFacts
from jaxis.server.endpoints.request_meter import UsageMeter
from jaxis.server.endpoints.served_model import ServedModel
from jaxis.server.http.api_keys import ApiKeys
from jaxis.server.http.auth import OPEN_PATHS, ApiKeyMiddleware
from jaxis.server.http.chat_page import add_chat_page, add_ollama_greeting, chat_page_paths
from jaxis.server.http.errors import install_error_handlers
from jaxis.server.http.head import HeadMiddleware
from jaxis.server.http.hosts import AllowedHostMiddleware, HostMiddleware
from jaxis.server.http.limits import RequestLimitMiddleware
from jaxis.server.http.openapi import install_openapi
from jaxis.server.http.request_log import QUIET_PATHS, RequestLogMiddleware
from jaxis.server.http.request_records import RequestLogFile, RequestRecordMiddleware
from jaxis.server.observability.key_metrics import KeyMetrics
from jaxis.server.observability.metrics import ServerMetrics
from jaxis.server.routes import admin, anthropic, health, llama_server, models, ollama, openai, tokenize
from jaxis.version import __version__

# What Anthropic's clients send from a browser.
ANTHROPIC_HEADERS = ("x-api-key", "anthropic-version", "anthropic-beta", "anthropic-dangerous-direct-browser-access")


def create_app(engine: AsyncLLMEngine, config: ServerConfig) -> FastAPI:
    """An ASGI application that serves an engine, which it starts and shuts down.

    Raises:
      ConfigError: There is no such parser.

    Args:
      engine: Not started yet.
      config: How to serve it.
    """
    parsers = ModelParsers.select(
        engine.tokenizer, engine.info.model_type, tool=config.tool_call_parser, reasoning=config.reasoning_parser
    )
    model = ServedModel(
        names=config.served_model_names,
        tokenizer=engine.tokenizer and engine.tokenizer.limited_to(engine.info.max_model_len),
        default_sampling_params=engine.info.default_sampling_params,
        grammar_compiler=engine.grammar_compiler,
        parsers=parsers,
        aliases=config.model_aliases,
        fingerprint=engine.info.fingerprint or None,
    )
    tracer = None
    if config.otlp_traces_endpoint is not None:
        from jaxis.server.observability.tracing import TraceContextMiddleware, make_tracer

        tracer = make_tracer(config.otlp_traces_endpoint, model.name)
    metrics = ServerMetrics(model.name, engine.info, engine.stats, prefix=config.metrics_prefix)
    facts = ServedModelFacts.of(engine.info, engine.tokenizer, parsers)
    ignored_fields = IgnoredFields(strict=config.strict_fields)
    keys = ApiKeys(config.api_keys, config.api_key_file)
    log = None if config.request_log is None else RequestLogFile(config.request_log)
    meter = UsageMeter(KeyMetrics(metrics.registry, config.metrics_prefix))
    context = ServerContext(engine, model, facts, config, metrics, ignored_fields, tracer, meter, keys, log)

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        engine.start()
        try:
            yield
        finally:
            await engine.shutdown()
            context.close()
            if tracer is not None:
                await asyncio.to_thread(tracer.shutdown)

    # Only the OpenAPI document: the documentation pages would load scripts from elsewhere.
    app = FastAPI(
        title="jaxis", version=__version__, docs_url=None, redoc_url=None, lifespan=lifespan, redirect_slashes=False
    )
    app.state.context = context
    _add_routes(app, config)
    page_paths = chat_page_paths() if config.webui else frozenset()
    install_openapi(app, with_keys=bool(keys))
    install_error_handlers(app)
    # The middleware added last is outermost.
    if tracer is not None:
        app.add_middleware(TraceContextMiddleware)
    app.add_middleware(
        RequestLimitMiddleware, max_body_bytes=config.max_body_bytes, timeout_seconds=config.body_timeout_seconds
    )
    quiet_paths = QUIET_PATHS | page_paths
    if log is not None:
        app.add_middleware(RequestRecordMiddleware, log=log, level=config.request_log_level, quiet_paths=quiet_paths)
    if keys:
        app.add_middleware(ApiKeyMiddleware, keys=keys, open_paths=OPEN_PATHS | page_paths)
    if config.only_allowed_hosts:
        app.add_middleware(AllowedHostMiddleware, hosts=config.allowed_hosts)
    if config.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=config.allowed_origins,
            allow_methods=["GET", "POST", "HEAD", "DELETE"],
            allow_headers=["Authorization", "Content-Type", "X-Request-Id", *ANTHROPIC_HEADERS],
            expose_headers=["X-Request-Id", "Retry-After", "Request-Id", HEADER],
        )
    app.add_middleware(HostMiddleware)
    app.add_middleware(HeadMiddleware)
    app.add_middleware(RequestLogMiddleware, quiet_paths=quiet_paths, on_response=metrics.http_response)
    return app


def _add_routes(app: FastAPI, config: ServerConfig) -> None:
    app.include_router(openai.router)
    app.include_router(anthropic.router)
    app.include_router(models.router)
    if config.tokenizer_info:
        app.include_router(models.tokenizer_router)
    app.include_router(llama_server.router)
    app.include_router(tokenize.router)
    app.include_router(health.router)
    app.include_router(admin.router)
    if config.ollama_api:
        app.include_router(ollama.router)
    if config.webui:
        add_chat_page(app, greets_ollama=config.ollama_api)
    elif config.ollama_api:
        add_ollama_greeting(app)
