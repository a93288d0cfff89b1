"""Limits on a request's body: its size, and the time between its parts."""

from __future__ import annotations

import asyncio
import time

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxis.server.http.errors import ApiError

MIN_BODY_BYTES_PER_SECOND = 1024


class RequestLimitMiddleware:
    """Refuses a body that is too large, as announced or as received, and one that stalls or arrives too slowly.

    Args:
      max_body_bytes: Most bytes of a body.
      timeout_seconds: Longest pause in a body, and how long the whole may take beyond the time that
        MIN_BODY_BYTES_PER_SECOND gives it.
    """

    def __init__(self, app: ASGIApp, *, max_body_bytes: int, timeout_seconds: float) -> None:
        self._app = app
        self._max_body_bytes = max_body_bytes
        self._timeout_seconds = timeout_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        if "transfer-encoding" in headers and "content-length" in headers:  # a proxy may believe the other one
            message = "a request has either Transfer-Encoding or Content-Length, not both"
            await ApiError(400, message, headers={"Connection": "close"}).response()(scope, receive, send)
            return
        announced = headers.get("content-length", "0")
        if announced.isdecimal() and (len(announced) > 18 or int(announced) > self._max_body_bytes):
            await ApiError(413, self._message()).response()(scope, receive, send)
            return
        num_bytes = 0
        complete = False
        start = time.monotonic()

        async def receive_limited() -> Message:
            nonlocal num_bytes, complete
            if complete:
                return await receive()  # waits for the client to disconnect
            time_left = start + self._timeout_seconds + num_bytes / MIN_BODY_BYTES_PER_SECOND - time.monotonic()
            try:
                async with asyncio.timeout(min(self._timeout_seconds, time_left)):
                    message = await receive()
            except TimeoutError:
                raise HTTPException(408, "the body came too slowly, or not at all") from None
            num_bytes += len(message.get("body", b""))
            if num_bytes > self._max_body_bytes:
                raise HTTPException(413, self._message())
            complete = not message.get("more_body", False)
            return message

        await self._app(scope, receive_limited, send)

    def _message(self) -> str:
        return f"the body is larger than the {self._max_body_bytes} bytes that this server takes: send less at a time"
