from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from contextvars import ContextVar
from typing import NoReturn

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxis.host.machine import return_free_memory
from jaxis.server.http.errors import ApiError, api_error

MIN_BODY_BYTES_PER_SECOND = 1024
LARGE_BODY_BYTES = 256 * 1024  # after larger bodies, memory is given back to the machine
# Part of a too large body that is read before the connection is closed: some clients read only after sending.
_DISCARDED_BODIES = 4  # as a multiple of the largest body
_DISCARD_SECONDS = 10.0


class _Body:
    """Body of the request that a task answers, received within the limits. `num_bytes` is the size received so far."""

    def __init__(self, receive: Receive, send: Send, max_bytes: int, timeout_seconds: float) -> None:
        self.num_bytes = 0
        self._receive, self._send = receive, send
        self._max_bytes = max_bytes
        self._timeout_seconds = timeout_seconds
        self._start = time.monotonic()
        self._is_complete = self._is_too_large = False

    async def receive(self) -> Message:
        """Returns the next part. Raises HTTPException if the body is too large, or comes too slowly."""
        if self._is_complete:
            return await self._receive()  # waits for the client to disconnect
        late = self._start + self._timeout_seconds + self.num_bytes / MIN_BODY_BYTES_PER_SECOND
        try:
            async with asyncio.timeout(min(self._timeout_seconds, late - time.monotonic())):
                message = await self._receive()
        except TimeoutError:
            raise HTTPException(408, "the body came too slowly, or not at all") from None
        self.num_bytes += len(message.get("body", b""))
        if self.num_bytes > self._max_bytes:
            self.refuse()
        self._is_complete = not message.get("more_body", False)
        return message

    def refuse(self) -> NoReturn:
        """Raises HTTPException, since the body is too large."""
        self._is_too_large = True
        message = (
            f"the body is larger than the {self._max_bytes} bytes that this server takes: send less at a time, or "
        )
        message += "start the server with a larger --max-body-size"
        raise HTTPException(413, message, headers={"Connection": "close"})

    async def send(self, message: Message) -> None:
        """Sends a part of the answer. After the answer to a too large body, reads and discards the rest of the body."""
        if self._is_too_large and message["type"] == "http.response.body" and not message.get("more_body", False):
            # The answer would be lost if the connection were closed while the client sends.
            await self._send({**message, "more_body": True})
            await self._discard_rest()
            message = {"type": "http.response.body", "body": b""}
        await self._send(message)

    async def _discard_rest(self) -> None:
        num_bytes = 0
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_DISCARD_SECONDS):
                while num_bytes < _DISCARDED_BODIES * self._max_bytes:
                    message = await self._receive()
                    num_bytes += len(message.get("body", b""))
                    if not message.get("more_body", False):
                        return


_current_body: ContextVar[_Body | None] = ContextVar("current_body", default=None)


def request_bytes() -> int:
    """Returns the size of the current request's body; 0 outside of requests."""
    body = _current_body.get()
    return 0 if body is None else body.num_bytes


class RequestLimitMiddleware:
    """Refuses a body that is too large, as announced or as received, and one that stalls or arrives too slowly.

    Args:
      max_body_bytes: Returns the size limit of a body, which may change.
      timeout_seconds: Longest pause in a body, and longest time that the whole body may take beyond the time that it
        takes at MIN_BODY_BYTES_PER_SECOND.
    """

    def __init__(self, app: ASGIApp, *, max_body_bytes: Callable[[], int], timeout_seconds: float) -> None:
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
        max_bytes = self._max_body_bytes()
        body = _Body(receive, send, max_bytes, self._timeout_seconds)
        _current_body.set(body)
        announced = headers.get("content-length", "0")
        if announced.isdecimal() and (len(announced) > 18 or int(announced) > max_bytes):
            try:
                body.refuse()
            except HTTPException as error:
                await api_error(error).response()(scope, receive, body.send)
            return
        await self._app(scope, body.receive, body.send)
        if body.num_bytes > LARGE_BODY_BYTES:
            # Later, when the callers have dropped the request.
            asyncio.get_running_loop().call_later(0.1, return_free_memory)
