"""Requests that wait until their model is loaded: they are told so, and a stream is never silent meanwhile."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from types import TracebackType
from typing import Any

from fastapi import Request, Response
from starlette.types import Message, Receive, Scope, Send

from jaxis.errors import JaxisError, RequestError
from jaxis.server.anthropic.message_job import MESSAGE_ERRORS
from jaxis.server.config import ServerConfig
from jaxis.server.context import Handler
from jaxis.server.generation.model_info import rfc3339
from jaxis.server.http import sse
from jaxis.server.http.body import StrictJSONRequest
from jaxis.server.http.errors import ApiError, api_error, error_dialect
from jaxis.server.ollama.ollama_answer import NDJSON
from jaxis.server.ollama.ollama_job import OLLAMA_ERRORS
from jaxis.server.openai.response_job import RESPONSE_ERRORS

HEADER = "X-Jaxis-Load"
"""Of an answer whose request waited for its model: the seconds, or "pending" in a stream that began before."""
_SCOPE_KEY = "jaxis.load"


class LoadWait:
    """A request's wait for its model, which lasts as long as the block.

    Attributes:
      model: Its name.
      seconds: How long it was; None while it lasts, and after it has failed.
    """

    def __init__(self, model: str) -> None:
        self.model = model
        self.seconds: float | None = None
        self._start = time.monotonic()

    @classmethod
    def of(cls, request: Request, model: str) -> LoadWait:
        """Begins one, which the answer of the request tells of."""
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
    """The model that a request names in its JSON, or in the address of one without.

    Raises:
      RequestError: It is no string.
    """
    if not isinstance(request, StrictJSONRequest):
        return request.query_params.get("model")
    # What is not declared as JSON is refused later, and names nothing.
    body = await request.json() if "json" in request.headers.get("content-type", "") else None
    name = body.get("model") if isinstance(body, dict) else None
    if name is not None and not isinstance(name, str):
        raise RequestError("must be a string", param="model")
    return name


async def answer_while_loading(request: Request, handler: Handler, config: ServerConfig) -> Response:
    """A handler's answer. If it waits for a model, and is to be a stream, the stream begins before it is there.

    Args:
      request: The request.
      handler: Answers it.
      config: How long a stream may be silent.
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
    """A stream whose first events say only that there is one, and whose others are those of another response.

    Args:
      response: The other response, which is yet to come.
      form: Writes signs of life and errors.
      config: How long the stream may be silent.
    """

    def __init__(self, response: asyncio.Future[Response], form: sse.StreamForm, config: ServerConfig) -> None:
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
        """Waits for the other response, and sends signs of life meanwhile."""
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


async def _stream_form(request: Request, model: str) -> sse.StreamForm | None:
    """How a stream looks in which there is nothing yet; None if the request asks for none."""
    body = await request.json() if isinstance(request, StrictJSONRequest) else None
    if not isinstance(body, dict):
        return None
    dialect = error_dialect(request.scope)
    if dialect is OLLAMA_ERRORS:
        return None if body.get("stream") is False else _OllamaLines(request.scope["path"], body.get("model") or model)
    if body.get("stream") is not True:
        return None
    if dialect is MESSAGE_ERRORS:
        return _MessageEvents()
    return _ResponseEvents() if dialect is RESPONSE_ERRORS else sse.DataEvents()


class _MessageEvents(sse.DataEvents):
    """Anthropic's."""

    def keep_alive(self) -> str:
        """An event that clients take for a sign of life, and nothing else."""
        return 'event: ping\ndata: {"type": "ping"}\n\n'

    def failure(self, error: ApiError) -> str:
        """The error as an event."""
        return f"event: error\ndata: {json.dumps(MESSAGE_ERRORS.body(error))}\n\n"


class _ResponseEvents(sse.DataEvents):
    """OpenAI's Responses: before their first event there are comments only, since clients know it by its place."""

    def failure(self, error: ApiError) -> str:
        """The error as an event."""
        body = error.body()["error"]
        event = {"type": "error", "sequence_number": 0, **{name: body[name] for name in ("code", "message", "param")}}
        return f"event: error\ndata: {json.dumps(event)}\n\n"


class _OllamaLines(sse.StreamForm):
    """Ollama's lines of /api/chat and /api/generate."""

    media_type = NDJSON

    def __init__(self, path: str, model: str) -> None:
        self._model = model
        message = {"message": {"role": "assistant", "content": ""}}
        self._empty: Mapping[str, Any] = message if path.endswith("/chat") else {"response": ""}

    def keep_alive(self) -> str:
        """A line that says only that the answer is still coming."""
        head = {"model": self._model, "created_at": rfc3339(datetime.now(UTC)), "done": False}
        return json.dumps({**head, **self._empty}) + "\n"

    def failure(self, error: ApiError) -> str:
        """The last line."""
        return json.dumps(OLLAMA_ERRORS.body(error)) + "\n"
