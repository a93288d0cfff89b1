"""Traces for OpenTelemetry: one span for each prompt, with spans of its time in the queue, in prefill and in decode.

Attribute names are those of the semantic conventions for generative AI, or vLLM's if there are none. Spans hold neither
prompts nor answers. This module is imported only if traces are wanted.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from jaxis.errors import ConfigError
from jaxis.server.observability.metrics import RequestObserver
from jaxis.version import __version__

try:
    from opentelemetry.context import Context, attach, detach, get_current
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import SERVICE_NAME, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from opentelemetry.trace import Span, SpanKind, StatusCode, set_span_in_context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
except ImportError as error:
    raise ConfigError(f"traces need {error.name}: pip install 'jaxis[otel]'") from None

EXPORT_SECONDS = 5
_SAMPLING = ("temperature", "top_p", "top_k", "max_tokens", "frequency_penalty", "presence_penalty")


class RequestTracer:
    """Writer of the spans of one server."""

    def __init__(self, provider: TracerProvider, model_name: str) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("jaxis", __version__)
        self._model_name = model_name

    def of_model(self, model_name: str) -> RequestTracer:
        """Returns a tracer for another model, with the same provider."""
        return RequestTracer(self._provider, model_name)

    @contextmanager
    def request(self, operation: str, request_id: str, request: RequestObserver) -> Iterator[None]:
        """Traces a request, which lasts as long as the `with` block and which the observer `request` times and counts.

        The operation is "chat" or "text_completion", and `request_id` the engine's.
        """
        parent = get_current()
        error: Exception | None = None
        try:
            yield
        except Exception as raised:
            error = raised
            raise
        finally:
            self._write(parent, operation, request_id, request, error)

    def shutdown(self) -> None:
        """Sends the remaining spans. It blocks for a while if the receiver does not respond."""
        self._provider.shutdown()

    def _write(
        self, parent: Context, operation: str, request_id: str, request: RequestObserver, error: Exception | None
    ) -> None:
        now = time.monotonic()
        epoch = time.time_ns() - round(now * 1e9)  # Unix time of the monotonic clock's zero

        def start(name: str, begin: float, context: Context, kind: SpanKind, **more: Any) -> Span:
            nanoseconds = epoch + round(begin * 1e9)
            return self._tracer.start_span(name, context, kind, start_time=nanoseconds, **more)

        attributes = self._attributes(operation, request_id, request, now)
        span = start(f"{operation} {self._model_name}", request.arrival, parent, SpanKind.SERVER, attributes=attributes)
        inside = set_span_in_context(span, parent)
        for name, begin, end in _phases(request, now):
            phase = start(name, begin, inside, SpanKind.INTERNAL)
            phase.end(epoch + round(end * 1e9))
        if error is not None:
            span.set_attribute("error.type", type(error).__name__)
            span.set_status(StatusCode.ERROR)
        span.end(epoch + round(now * 1e9))

    def _attributes(self, operation: str, request_id: str, request: RequestObserver, now: float) -> dict[str, Any]:
        params = request.params
        attributes: dict[str, Any] = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "jaxis",
            "gen_ai.request.model": self._model_name,
            "gen_ai.response.model": self._model_name,
            "gen_ai.request.id": request_id,
            "gen_ai.request.choice.count": params.n,
            **{f"gen_ai.request.{name}": getattr(params, name) for name in _SAMPLING},
            "gen_ai.response.finish_reasons": [
                *request.finish_reasons,
                *["abort"] * (params.n - len(request.finish_reasons)),
            ],
            "gen_ai.usage.input_tokens": request.num_prompt_tokens,
            "gen_ai.usage.cache_read.input_tokens": request.num_cached_tokens,
            "gen_ai.usage.output_tokens": sum(request.num_tokens),
            "gen_ai.latency.e2e": now - request.arrival,
        }
        names = {"queue": "time_in_queue", "prefill": "time_in_model_prefill", "decode": "time_in_model_decode"}
        for name, begin, end in _phases(request, now):
            attributes[f"gen_ai.latency.{names[name]}"] = end - begin
        if params.seed is not None:
            attributes["gen_ai.request.seed"] = params.seed if params.seed < 2**63 else str(params.seed)  # int64 there
        if request.first_token is not None:
            attributes["gen_ai.latency.time_to_first_token"] = request.first_token - request.arrival
        return {name: value for name, value in attributes.items() if value is not None}


class TraceContextMiddleware:
    """Makes the span that a request names in the header `traceparent` the parent of its spans."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._propagator = TraceContextTextMapPropagator()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        token = attach(self._propagator.extract(dict(Headers(scope=scope)), Context()))
        try:
            await self._app(scope, receive, send)
        finally:
            detach(token)


def make_tracer(endpoint: str, model_name: str) -> RequestTracer:
    """Makes a tracer that sends spans to a collector, in protobuf over HTTP.

    The endpoint is an address such as "http://localhost:4318"; "/v1/traces" is added if it has no path. `model_name` is
    the model's in answers. Raises ConfigError if the endpoint is not an address.
    """
    check_endpoint(endpoint)
    path = endpoint.partition("://")[2].partition("/")[2]
    exporter = OTLPSpanExporter(endpoint if path else f"{endpoint.rstrip('/')}/v1/traces", timeout=EXPORT_SECONDS)
    name = os.environ.get("OTEL_SERVICE_NAME", "jaxis")
    provider = TracerProvider(resource=Resource.create({SERVICE_NAME: name}), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return RequestTracer(provider, model_name)


def check_endpoint(endpoint: str) -> None:
    """Raises ConfigError if an endpoint cannot be the address of a collector."""
    if not endpoint.startswith(("http://", "https://")) or not endpoint.partition("://")[2].strip("/"):
        raise ConfigError(
            f"--otlp-traces-endpoint={endpoint!r} is not an address such as http://localhost:4318: "
            "give that of a collector's OTLP receiver for HTTP"
        )


def _phases(request: RequestObserver, now: float) -> Sequence[tuple[str, float, float]]:
    """Returns name, begin and end of the request's phases, in `time.monotonic` seconds."""
    if request.first_scheduled is None or request.first_token is None:
        return [("queue", request.arrival, now)]
    scheduled = max(request.arrival, request.first_scheduled)
    return [
        ("queue", request.arrival, scheduled),
        ("prefill", scheduled, request.first_token),
        ("decode", request.first_token, request.last_token),
    ]
