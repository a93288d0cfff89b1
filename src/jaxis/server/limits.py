"""Limits on what comes in: the size of a request's headers and body, and how long it may dawdle."""

from __future__ import annotations

import asyncio

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxis.server.errors import ApiError
from jaxis.server.http_protocol import MAX_HEADER_BYTES


class RequestLimitMiddleware:
    """Refuses headers that are too large, a body that is, by what it announces or by what has come, and one that stops
    coming.
    """

    def __init__(self, app: ASGIApp, *, max_body_bytes: int, timeout_seconds: float) -> None:
        self._app = app
        self._max_body_bytes = max_body_bytes
        self._timeout_seconds = timeout_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if sum(len(name) + len(value) for name, value in scope["headers"]) > MAX_HEADER_BYTES:
            message = f"the headers are larger than the {MAX_HEADER_BYTES} bytes that this server takes"
            await ApiError(431, message).response()(scope, receive, send)
            return
        announced = Headers(scope=scope).get("content-length", "0")
        if announced.isdecimal() and (len(announced) > 18 or int(announced) > self._max_body_bytes):
            await ApiError(413, self._message()).response()(scope, receive, send)
            return
        num_bytes = 0
        complete = False

        async def receive_limited() -> Message:
            nonlocal num_bytes, complete
            if complete:
                return await receive()  # waits for the client to go
            try:
                async with asyncio.timeout(self._timeout_seconds):
                    message = await receive()
            except TimeoutError:
                raise HTTPException(408, f"the body stopped coming for {self._timeout_seconds:g} s") from None
            num_bytes += len(message.get("body", b""))
            if num_bytes > self._max_body_bytes:
                raise HTTPException(413, self._message())
            complete = not message.get("more_body", False)
            return message

        await self._app(scope, receive_limited, send)

    def _message(self) -> str:
        return f"the body is larger than the {self._max_body_bytes} bytes that this server takes: send less at a time"
