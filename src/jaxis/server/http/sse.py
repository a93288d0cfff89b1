"""Server-sent events, and answers that are cancelled when the client disconnects."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from typing import TypeVar

import msgspec
from fastapi import Request, Response
from pydantic import BaseModel
from starlette.types import Receive, Scope, Send

from jaxis.errors import JaxisError
from jaxis.server.config import ServerConfig
from jaxis.server.http.errors import ErrorDialect, StreamForm, api_error, error_dialect

Result = TypeVar("Result")
CLIENT_CLOSED_REQUEST = 499
# Time that a stream's headers wait for its first event, so that an error before it has an HTTP status of its own.
FIRST_EVENT_SECONDS = 2.0
_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
_logger = logging.getLogger(__name__)


class ClientDisconnectedError(Exception):
    """The client has disconnected."""


def sse_event(data: BaseModel) -> str:
    return f"data: {data.model_dump_json()}\n\n"


class TextEvents:
    """Events that differ in one string only, such as most events of a stream. They are written in a tenth of the time.

    `make` returns the data of the event with a string.
    """

    def __init__(self, make: Callable[[str], BaseModel]) -> None:
        mark = uuid.uuid4().hex
        self._before, self._after = sse_event(make(mark)).split(f'"{mark}"')

    def event(self, text: str) -> str:
        return f"{self._before}{msgspec.json.encode(text).decode()}{self._after}"


async def run_until_disconnect(
    receive: Receive, work: Awaitable[Result], *, check: Callable[[], None] | None = None, check_seconds: float = 1.0
) -> Result:
    """Awaits some work, and cancels it as soon as the client disconnects, which Starlette does not.

    `receive` reports the disconnect. An error of `check`, called every `check_seconds`, ends the work. Raises
    ClientDisconnectedError if the client has disconnected.
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
    """Returns a whole answer as JSON. The work is cancelled if the client disconnects."""
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
    """Returns a stream of events. An error within `FIRST_EVENT_SECONDS`, before the first event, is raised instead.

    `form` is that of signs of life and errors, and `config` has limits on a stream's silence and on time left unread.
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
    """Sends events as they come. It ends when the client disconnects or does not read.

    Args:
      first: The first event, which may not have come yet.
      events: Later events.
      form: Form of signs of life and errors.
      config: Limits on a stream's silence (`sse_keep_alive_seconds`) and on time left unread (`write_timeout_seconds`).
      headers: Additional headers.
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
        # A timeout for every event would cost as much as sending it; `_check_progress` watches instead.
        self._last_send, self._is_sending = time.monotonic(), True
        await send({"type": "http.response.body", "body": event.encode("utf-8"), "more_body": more})
        self._is_sending = False

    def _check_progress(self) -> None:
        if self._is_sending and time.monotonic() - self._last_send > self._write_timeout:
            raise TimeoutError


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
