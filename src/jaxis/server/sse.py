"""Server-sent events, and answers that end when nobody waits for them any more."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Awaitable
from contextlib import aclosing
from typing import TypeVar

from fastapi import Request, Response
from pydantic import BaseModel
from starlette.types import Receive, Scope, Send

from jaxis.errors import JaxisError
from jaxis.server.errors import api_error

Result = TypeVar("Result")
DONE = "data: [DONE]\n\n"
CLIENT_CLOSED_REQUEST = 499
_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
_logger = logging.getLogger(__name__)


class ClientDisconnectedError(Exception):
    """The client has gone; there is nobody to answer."""


def sse_event(data: BaseModel) -> str:
    """An event with JSON as its data."""
    return f"data: {data.model_dump_json()}\n\n"


async def run_until_disconnect(receive: Receive, work: Awaitable[Result]) -> Result:
    """Runs some work, and cancels it as soon as the client disconnects: Starlette does not.

    Raises:
      ClientDisconnectedError: The client has gone.
    """
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnectedError
    finally:
        task.cancel()
        watcher.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def respond(request: Request, work: Awaitable[BaseModel]) -> Response:
    """A whole answer as JSON; the work is cancelled if the client disconnects."""
    try:
        answer = await run_until_disconnect(request.receive, work)
    except ClientDisconnectedError:
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    return Response(answer.model_dump_json(), media_type="application/json")


async def respond_stream(request: Request, events: AsyncGenerator[str, None], write_timeout: float) -> Response:
    """A stream of events; an error before the first of them is a plain error answer."""
    try:
        first = await run_until_disconnect(request.receive, anext(events))
    except ClientDisconnectedError:
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    return EventStreamResponse(first, events, write_timeout)


class EventStreamResponse(Response):
    """Sends events as they come; ends them when the client disconnects or does not read.

    Args:
      first: The first event.
      events: Those after it.
      write_timeout: Seconds that the client may leave the stream unread while there is something to send.
    """

    media_type = "text/event-stream"

    def __init__(self, first: str, events: AsyncGenerator[str, None], write_timeout: float) -> None:
        self.status_code = 200
        self.background = None
        self.body = b""
        self.init_headers(_HEADERS)
        del self.headers["content-length"]
        self._first = first
        self._events = events
        self._write_timeout = write_timeout

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._events):
            try:
                await run_until_disconnect(receive, self._send_all(send))
            except ClientDisconnectedError:
                _logger.debug("a client left its stream")
            except TimeoutError:
                _logger.warning("a stream was cut: its client did not read it for %g s", self._write_timeout)
                raise

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await self._send(send, self._first)
        try:
            async for event in self._events:
                await self._send(send, event)
        except TimeoutError:
            raise
        except Exception as error:  # too late for a status: the stream says it
            if not isinstance(error, JaxisError):
                _logger.exception("a stream failed")
            await self._send(send, _error_event(error) + DONE)
        await self._send(send, "", more=False)

    async def _send(self, send: Send, event: str, *, more: bool = True) -> None:
        async with asyncio.timeout(self._write_timeout):
            await send({"type": "http.response.body", "body": event.encode("utf-8"), "more_body": more})


def _error_event(error: Exception) -> str:
    return f"data: {json.dumps(api_error(error).body())}\n\n"


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
