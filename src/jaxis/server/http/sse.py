"""Server-sent events, and answers that are cancelled when the client disconnects."""

from __future__ import annotations

import asyncio
import json
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from typing import Protocol, TypeVar

import msgspec
from fastapi import Request, Response
from pydantic import BaseModel
from starlette.types import Receive, Scope, Send

from jaxis.errors import JaxisError
from jaxis.server.config import ServerConfig
from jaxis.server.http.errors import ApiError, ErrorDialect, api_error, error_dialect

Result = TypeVar("Result")
DONE = "data: [DONE]\n\n"
CLIENT_CLOSED_REQUEST = 499
# How long a stream's headers wait for its first event, so that an error that comes before it has a status of its own.
FIRST_EVENT_SECONDS = 2.0
_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
_logger = logging.getLogger(__name__)


class ClientDisconnectedError(Exception):
    """The client has disconnected."""


class StreamForm(Protocol):
    """How a protocol writes what a stream holds besides its answer.

    Attributes:
      media_type: The stream's content type.
    """

    media_type: str

    def keep_alive(self) -> str:
        """What shows a client that waits that the answer is under way; called between events, or before the first."""
        ...

    def failure(self, error: ApiError) -> str:
        """The end of a stream that has failed."""
        ...


class DataEvents(StreamForm):
    """The streams of chat and text completions."""

    media_type = "text/event-stream"

    def keep_alive(self) -> str:
        """A comment."""
        return ": keep-alive\n\n"

    def failure(self, error: ApiError) -> str:
        """The error object as an event."""
        return f"data: {json.dumps(error.body())}\n\n{DONE}"


def sse_event(data: BaseModel) -> str:
    """An event with JSON as its data."""
    return f"data: {data.model_dump_json()}\n\n"


class TextEvents:
    """Events that differ in one string alone: most of a stream's by far, written here in a tenth of the time.

    Args:
      make: The data of the event with a string.
    """

    def __init__(self, make: Callable[[str], BaseModel]) -> None:
        mark = uuid.uuid4().hex
        self._before, self._after = sse_event(make(mark)).split(f'"{mark}"')

    def event(self, text: str) -> str:
        """The event with this string."""
        return f"{self._before}{msgspec.json.encode(text).decode()}{self._after}"


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


async def respond_whole(request: Request, work: Awaitable[BaseModel], headers: Mapping[str, str]) -> Response:
    """A whole answer as JSON; the work is cancelled if the client disconnects."""
    try:
        answer = await run_until_disconnect(request.receive, work)
    except ClientDisconnectedError:
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    return Response(answer.model_dump_json(), media_type="application/json", headers=headers)


async def respond_stream(
    request: Request,
    events: AsyncGenerator[str, None],
    form: StreamForm,
    config: ServerConfig,
    headers: Mapping[str, str],
) -> Response:
    """A stream of events; an error soon, before the first of them, is a plain error answer.

    Args:
      request: The request.
      events: The answer, as it is sent.
      form: Writes signs of life and errors.
      config: How long the stream may be silent, or left unread.
      headers: More headers of the answer.
    """
    first = asyncio.ensure_future(anext(events))
    try:
        soon = asyncio.wait({first}, timeout=FIRST_EVENT_SECONDS)
        await run_until_disconnect(request.receive, soon)
        if first.done():
            first.result()  # raises its error
    except BaseException as error:
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        if not isinstance(error, ClientDisconnectedError):
            raise
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    return EventStreamResponse(first, events, form, config, headers)


class EventStreamResponse(Response):
    """Sends events as they come; ends them when the client disconnects or does not read.

    Args:
      first: The first event, which may be yet to come.
      events: Those after it.
      form: Writes signs of life and errors.
      config: How long the stream may be silent (`sse_keep_alive_seconds`), or left unread (`write_timeout_seconds`).
      headers: More headers.
    """

    def __init__(
        self,
        first: asyncio.Future[str],
        events: AsyncGenerator[str, None],
        form: StreamForm,
        config: ServerConfig,
        headers: Mapping[str, str],
    ) -> None:
        self.status_code = 200
        self.background = None
        self.body = b""
        self.media_type = form.media_type
        self.init_headers({**_HEADERS, **headers})
        del self.headers["content-length"]
        self._first = first
        self._events = events
        self._form = form
        self._write_timeout = config.write_timeout_seconds
        self._silence_seconds = config.sse_keep_alive_seconds
        self._last_send = time.monotonic()
        self._is_sending = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._events):
            try:
                sending = self._send_all(send, error_dialect(scope))
                await run_until_disconnect(
                    receive, sending, check=self._check_progress, check_seconds=self._write_timeout / 4
                )
            except ClientDisconnectedError:
                _logger.debug("a client left its stream")
            except TimeoutError:
                _logger.warning("a stream was cut: its client did not read it for %g s", self._write_timeout)
                raise
            finally:
                self._first.cancel()
                await asyncio.gather(self._first, return_exceptions=True)

    async def _send_all(self, send: Send, dialect: ErrorDialect) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        keeping_alive = asyncio.ensure_future(self._keep_alive(send)) if self._silence_seconds else None
        try:
            await self._send(send, await self._first)
            async for event in self._events:
                await self._send(send, event)
        except Exception as error:  # too late for a status: the error is sent in the stream
            if not isinstance(error, JaxisError):
                _logger.exception("a stream failed")
            await self._send(send, self._form.failure(api_error(error, dialect)))
        finally:
            if keeping_alive is not None:
                keeping_alive.cancel()
                await asyncio.gather(keeping_alive, return_exceptions=True)
        await self._send(send, "", more=False)

    async def _keep_alive(self, send: Send) -> None:
        if not self._first.done():  # it was waited for already
            await self._send(send, self._form.keep_alive())
        while True:
            silent_seconds = 0.0 if self._is_sending else time.monotonic() - self._last_send
            if silent_seconds >= self._silence_seconds:
                await self._send(send, self._form.keep_alive())
            else:
                await asyncio.sleep(self._silence_seconds - silent_seconds)

    async def _send(self, send: Send, event: str, *, more: bool = True) -> None:
        # A timeout of its own for every event would cost as much as sending it.
        self._last_send, self._is_sending = time.monotonic(), True
        await send({"type": "http.response.body", "body": event.encode("utf-8"), "more_body": more})
        self._is_sending = False

    def _check_progress(self) -> None:
        if self._is_sending and time.monotonic() - self._last_send > self._write_timeout:
            raise TimeoutError


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
