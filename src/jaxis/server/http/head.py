"""HEAD requests: whatever can be got can be asked for without its body."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send


class HeadMiddleware:
    """Lets the application answer HEAD as GET; uvicorn, which still sees a HEAD, leaves out the body."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return
        inner = {**scope, "method": "GET"}
        try:
            await self._app(inner, receive, send)
        finally:
            if "route" in inner:  # what the log and metrics outside of here know a request by
                scope["route"] = inner["route"]
