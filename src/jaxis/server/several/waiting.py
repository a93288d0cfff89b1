"""Requests that wait until their model is loaded: a header reports the wait, and streams send signs of life."""

from __future__ import annotations

import asyncio
import time
from types import TracebackType

from fastapi import Request, Response
from starlette.types import Message, Receive, Scope, Send

from jaxis.errors import JaxisError, RequestError
from jaxis.server.config import ServerConfig
from jaxis.server.context import Handler
from jaxis.server.http import sse
from jaxis.server.http.errors import StreamForm, api_error, error_dialect
from jaxis.server.http.strict_json import StrictJSONRequest

HEADER = "X-Jaxis-Load"
"""Header of an answer that waited for its model: the seconds, or "pending" in a stream that began before."""
_SCOPE_KEY = "jaxis.load"


class LoadWait:
    """A request's wait for its model, which lasts as long as the `with` block.

    Attributes:
      seconds: Duration of the wait; None while it lasts, and after a failure.
    """

    def __init__(self, model: str) -> None:
        self.model = model
        self.seconds: float | None = None
        self._start = time.monotonic()

    @classmethod
    def of(cls, request: Request, model: str) -> LoadWait:
        """Starts a wait, which the request's answer reports."""
        wait = request.scope[_SCOPE_KEY] = cls(model)
        return wait

    def __enter__(self) -> LoadWait:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.seconds = time.monotonic() - self._start


async def asked_model(request: Request) -> str | None:
    """Returns the model that a request names in its JSON, or in its query if it has no JSON.

    Raises:
      RequestError: The name is not a string.
    """
    if not isinstance(request, StrictJSONRequest):
        return request.query_params.get("model")
    # Other content types are refused later, and name no model.
    body = await request.json() if "json" in request.headers.get("content-type", "") else None
    name = body.get("model") if isinstance(body, dict) else None
    if name is not None and not isinstance(name, str):
        raise RequestError("must be a string", param="model")
    return name


async def answer_while_loading(request: Request, handler: Handler, config: ServerConfig) -> Response:
    """Returns a handler's answer. If it waits for a model and is a stream, the stream begins before the model is
    loaded.
    """
    work = asyncio.ensure_future(handler(request))
    try:
        await asyncio.wait({work}, timeout=sse.FIRST_EVENT_SECONDS)
        wait = request.scope.get(_SCOPE_KEY)
        if not work.done() and isinstance(wait, LoadWait) and wait.seconds is None:
            form = await _stream_form(request, wait.model)
            if form is not None:
                return _LoadingStream(work, form, config)
        response = await work
    except BaseException:
        work.cancel()
        raise
    wait = request.scope.get(_SCOPE_KEY)
    if isinstance(wait, LoadWait) and wait.seconds is not None:
        response.headers[HEADER] = f"{wait.seconds:.2f}"
    return response


class _LoadingStream(Response):
    """A stream that sends signs of life until another response is ready, and then that response."""

    def __init__(self, response: asyncio.Future[Response], form: StreamForm, config: ServerConfig) -> None:
        self.status_code, self.background, self.body = 200, None, b""
        self.media_type = form.media_type
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no", HEADER: "pending"})
        del self.headers["content-length"]
        self._response = response
        self._form = form
        self._silence_seconds = config.sse_keep_alive_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            try:
                response = await sse.run_until_disconnect(receive, self._wait(send))
            except sse.ClientDisconnectedError:
                return
            except Exception as error:  # too late for a status: the error is sent in the stream
                text = self._form.failure(api_error(error, error_dialect(scope)))
                await send({"type": "http.response.body", "body": text.encode(), "more_body": False})
                if not isinstance(error, JaxisError):
                    raise
                return
            await response(scope, receive, _without_start(send))
        finally:
            self._response.cancel()
            await asyncio.gather(self._response, return_exceptions=True)

    async def _wait(self, send: Send) -> Response:
        while not self._response.done():
            if self._silence_seconds:
                await send({"type": "http.response.body", "body": self._form.keep_alive().encode(), "more_body": True})
            await asyncio.wait({self._response}, timeout=self._silence_seconds or None)
        return self._response.result()


def _without_start(send: Send) -> Send:
    async def send_rest(message: Message) -> None:
        if message["type"] != "http.response.start":
            await send(message)

    return send_rest


async def _stream_form(request: Request, model: str) -> StreamForm | None:
    """Returns the form of a stream whose answer has not begun; None if the request asks for no stream."""
    body = await request.json() if isinstance(request, StrictJSONRequest) else None
    if not isinstance(body, dict):
        return None
    return error_dialect(request.scope).empty_stream(request.scope["path"], body, model)
