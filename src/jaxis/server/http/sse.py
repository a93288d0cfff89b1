"""Server-sent events, and answers that are cancelled when the client disconnects."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import TypeVar

from fastapi import Request, Response
from pydantic import BaseModel
from starlette.types import Receive, Scope, Send

from jaxis.errors import JaxisError
from jaxis.server.http.errors import api_error

Result = TypeVar("Result")
DONE = "data: [DONE]\n\n"
CLIENT_CLOSED_REQUEST = 499
_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
_logger = logging.getLogger(__name__)


class ClientDisconnectedError(Exception):
    """The client has disconnected."""


def sse_event(data: BaseModel) -> str:
    """An event with JSON as its data."""
    return f"data: {data.model_dump_json()}\n\n"


async def run_until_disconnect(
    receive: Receive, work: Awaitable[Result], *, check: Callable[[], None] | None = None, check_seconds: float = 1.0
) -> Result:
    """Runs some work, and cancels it as soon as the client disconnects: Starlette does not.

    Args:
      receive: Reports the disconnect.
      work: What to run.
      check: Called every `check_seconds` meanwhile; an error that it raises ends the work.
      check_seconds: See `check`.

    Raises:
      ClientDisconnectedError: The client has gone.
    """
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnected(receive))
    timeout = None if check is None else check_seconds
    try:
        while not (await asyncio.wait({task, watcher}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED))[0]:
            assert check is not None  # otherwise the wait without a result never ends
            check()
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
        self._sending_since: float | None = None

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._events):
            try:
                sending = self._send_all(send)
                await run_until_disconnect(
                    receive, sending, check=self._check_progress, check_seconds=self._write_timeout / 4
                )
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
        except Exception as error:  # too late for a status: the error is sent in the stream
            if not isinstance(error, JaxisError):
                _logger.exception("a stream failed")
            await self._send(send, _error_event(error) + DONE)
        await self._send(send, "", more=False)

    async def _send(self, send: Send, event: str, *, more: bool = True) -> None:
        # A timeout of its own for every event would cost as much as sending it.
        self._sending_since = time.monotonic()
        await send({"type": "http.response.body", "body": event.encode("utf-8"), "more_body": more})
        self._sending_since = None

    def _check_progress(self) -> None:
        if self._sending_since is not None and time.monotonic() - self._sending_since > self._write_timeout:
            raise TimeoutError


def _error_event(error: Exception) -> str:
    return f"data: {json.dumps(api_error(error).body())}\n\n"


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
