"""Logs: one line a request, with the id that the client gets too; as text, or as JSON for programs."""

from __future__ import annotations

import json
import logging
import re
import time
import uuid
from collections.abc import Callable, Set
from contextvars import ContextVar
from datetime import UTC, datetime

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_SAFE_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_MAX_PATH_CHARACTERS = 500
QUIET_PATHS = frozenset({"/health", "/ready", "/metrics"})
_logger = logging.getLogger("jaxis.server.access")
current_request_id: ContextVar[str | None] = ContextVar("current_request_id", default=None)


class RequestLogMiddleware:
    """Gives every request an id, the client's own `X-Request-Id` if it sends a decent one, and logs its end.

    Args:
      quiet_paths: Their requests are logged at level DEBUG, unless they fail.
      on_response: Called at the end of each with the route's pattern ("none" if there is no such route), the method
        and the status.
    """

    def __init__(
        self,
        app: ASGIApp,
        quiet_paths: Set[str] = QUIET_PATHS,
        on_response: Callable[[str, str, int], None] = lambda handler, method, status: None,
    ) -> None:
        self._app = app
        self._quiet_paths = quiet_paths
        self._on_response = on_response

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if _SAFE_ID.fullmatch(given) else uuid.uuid4().hex
        current_request_id.set(request_id)
        start = time.monotonic()
        status = 500

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["X-Request-Id"] = request_id
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        finally:
            route = scope.get("route")
            self._on_response(getattr(route, "path", "none"), scope["method"], status)
            level = logging.DEBUG if scope["path"] in self._quiet_paths and status < 400 else logging.INFO
            fields = {
                "method": scope["method"],
                "path": scope["path"][:_MAX_PATH_CHARACTERS],
                "status": status,
                "seconds": round(time.monotonic() - start, 4),
                "client": scope["client"][0] if scope.get("client") else None,
            }
            # %r: what a client sends begins no line of its own.
            _logger.log(level, "%(method)s %(path)r %(status)d in %(seconds)s s", fields, extra={"fields": fields})


class RequestIdFilter(logging.Filter):
    """Notes the id of the request that a log line is about."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Logging's call; lets everything through."""
        record.request_id = current_request_id.get()
        return True


class JsonFormatter(logging.Formatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        """Logging's call."""
        fields = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            "request_id": getattr(record, "request_id", None),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps({name: value for name, value in fields.items() if value is not None})


class TextFormatter(logging.Formatter):
    """One line for a person."""

    def format(self, record: logging.LogRecord) -> str:
        """Logging's call."""
        text = f"{self.formatTime(record, '%H:%M:%S')} {record.levelname.lower()}: {record.getMessage()}"
        request_id = getattr(record, "request_id", None)
        if request_id:
            text += f" [{request_id}]"
        return f"{text}\n{self.formatException(record.exc_info)}" if record.exc_info else text


def set_up_logs(*, as_json: bool, level: int = logging.INFO) -> None:
    """Writes the log messages of jaxis and of uvicorn to stderr."""
    handler = logging.StreamHandler()
    handler.addFilter(RequestIdFilter())
    handler.setFormatter(JsonFormatter() if as_json else TextFormatter())
    for name, its_level in (("jaxis", level), ("uvicorn", logging.WARNING)):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.setLevel(its_level)
        logger.propagate = False
