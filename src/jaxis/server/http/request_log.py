from __future__ import annotations

import logging
import re
import time
import uuid
from collections.abc import Callable, Set
from contextvars import ContextVar

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxis.host.logs import current_request_id
from jaxis.server.http.errors import error_dialect

QUIET_PATHS = frozenset({"/health", "/ping", "/ready", "/metrics"})
_SAFE_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_MAX_PATH_CHARACTERS = 500

current_address: ContextVar[str | None] = ContextVar("current_address", default=None)
"""Network address of the current request's client; None if it is not known."""

_logger = logging.getLogger("jaxis.server.access")


class RequestLogMiddleware:
    """Logs each request in one line at its end, with an id that is also sent to the client.

    The id is the client's own `X-Request-Id` if it is valid.

    Args:
      quiet_paths: Paths whose requests are logged at level DEBUG, unless they fail.
      on_response: Callback at the end of each request, with the route's pattern ("none" if there is no such route), the
        method and the status.
    """

    def __init__(
        self,
        app: ASGIApp,
        quiet_paths: Set[str] = QUIET_PATHS,
        on_response: Callable[[str, str, int], None] = lambda *_: None,
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
        address = scope.get("client")  # None if the server listens on a Unix socket
        current_address.set(None if address is None else address[0])
        start = time.monotonic()
        status = 500

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                for name in ("X-Request-Id", *error_dialect(scope).request_id_headers):
                    MutableHeaders(scope=message)[name] = request_id
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
            # %r, so that client data cannot start a new log line.
            _logger.log(level, "%(method)s %(path)r %(status)d in %(seconds)s s", fields, extra={"fields": fields})
