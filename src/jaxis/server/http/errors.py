"""Errors in OpenAI's shape, {"error": {"message", "type", "param", "code"}}, and in that of the path's protocol."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxis.errors import (
    ContextLengthError,
    DeadlineExceededError,
    EngineError,
    JaxisError,
    OverloadedError,
    RateLimitError,
    RequestError,
    UnavailableError,
)
from jaxis.server.http.error_shapes import OLLAMA_PATHS, anthropic_error, is_anthropic

_logger = logging.getLogger(__name__)
_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}
# SamplingParams and the engine name what is wrong at the start of the message: "top_p=2.0 must be ...".
_PARAM = re.compile(r"([a-z_]+)(?:=|\[| holds )")
_MAX_MESSAGE_CHARACTERS = 1000  # a message may quote the request


@dataclass(frozen=True)
class ApiError:
    """An error as the client sees it.

    Attributes:
      status: HTTP status.
      message: One line.
      param: The request's field that is at fault, if one is.
      code: A name for programs, if there is one.
      headers: More headers of the response.
    """

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    def body(self) -> dict[str, Any]:
        """OpenAI's error object."""
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        message = self.message
        if len(message) > _MAX_MESSAGE_CHARACTERS:
            message = message[: _MAX_MESSAGE_CHARACTERS // 2] + " ... " + message[-_MAX_MESSAGE_CHARACTERS // 2 :]
        return {"error": {"message": message, "type": kind, "param": self.param, "code": self.code}}

    def shaped(self, path: str) -> dict[str, Any]:
        """The error object that clients of this path expect."""
        if path.startswith(OLLAMA_PATHS):
            return {"error": self.body()["error"]["message"]}
        return anthropic_error(self.status, self.message) if is_anthropic(path) else self.body()

    def response(self) -> ApiErrorResponse:
        """The error as a whole answer."""
        return ApiErrorResponse(self)


class ApiErrorResponse(Response):
    """An error as a whole answer, in the shape that clients of the request's path expect."""

    def __init__(self, error: ApiError) -> None:
        super().__init__(status_code=error.status, headers=dict(error.headers))
        self._error = error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = self._error.shaped(scope["path"])
        whole = JSONResponse(body, status_code=self._error.status, headers=dict(self._error.headers))
        await whole(scope, receive, send)


class ParameterError(RequestError):
    """A request's field that cannot be honoured.

    Attributes:
      param: Its name.
      code: A name of the fault for programs, if there is one.
    """

    def __init__(self, param: str, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class ModelNotFoundError(RequestError):
    """A request for a model that is not served here."""


def api_error(error: Exception) -> ApiError:
    """The client's view of an exception; unexpected ones are logged, and their details are not sent."""
    if isinstance(error, JaxisError):
        return _jaxis_error(error)
    if isinstance(error, RequestValidationError):
        return _validation_error(error)
    if isinstance(error, HTTPException):
        return ApiError(error.status_code, str(error.detail), headers=error.headers or {})
    _logger.error("a request failed inside the server", exc_info=error)
    return ApiError(500, "the server has a fault, described in its log", code="internal_error")


def _jaxis_error(error: JaxisError) -> ApiError:
    if isinstance(error, ModelNotFoundError):
        return ApiError(404, str(error), "model", "model_not_found")
    if isinstance(error, ParameterError):
        return ApiError(400, str(error), error.param, error.code)
    if isinstance(error, ContextLengthError):
        return ApiError(400, str(error), code="context_length_exceeded")
    if isinstance(error, RequestError):
        match = _PARAM.match(str(error))
        return ApiError(400, str(error), match[1] if match else None)
    if isinstance(error, OverloadedError):
        retry = {"Retry-After": str(error.retry_after_seconds)}
        code = "rate_limit_exceeded" if isinstance(error, RateLimitError) else "server_overloaded"
        return ApiError(429, str(error), code=code, headers=retry)
    if isinstance(error, UnavailableError):
        return ApiError(503, str(error), code="server_unavailable", headers={"Retry-After": "5"})
    if isinstance(error, DeadlineExceededError):
        return ApiError(504, str(error), code="request_timeout")
    if isinstance(error, EngineError):
        return ApiError(500, str(error), code="engine_error")
    return ApiError(400, str(error))


class FaultMiddleware:
    """Turns unexpected exceptions into error objects. Innermost, so that other middleware adds its headers."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def send_noting_start(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self._app(scope, receive, send_noting_start)
        except Exception as error:
            if started or scope["type"] != "http":
                raise
            await api_error(error).response()(scope, receive, send)


def install_error_handlers(app: FastAPI) -> None:
    """Makes every error of the application's routes an error object. Call it before other middleware is added."""

    async def handle(_request: Request, error: Exception) -> Response:
        return api_error(error).response()

    for kind in (JaxisError, RequestValidationError, HTTPException):
        app.add_exception_handler(kind, handle)
    app.add_middleware(FaultMiddleware)


def _validation_error(error: RequestValidationError) -> ApiError:
    """The first fault that pydantic found, in one line; of a union's, the one that got furthest into the value."""
    faults = error.errors()
    fault = max(faults, key=_how_far) if len(faults) > 1 and _same_field(faults) else faults[0]
    names = [part for part in fault["loc"] if part not in ("body", "query", "path")]
    where = _path(names)
    param = str(names[0]) if names and isinstance(names[0], str) else None
    if fault["type"] == "extra_forbidden":
        return ApiError(400, f"{where} is not a known parameter: leave it out", param, "unknown_parameter")
    if fault["type"] == "missing":
        return ApiError(400, f"{where or 'the request body'} is missing", param, "missing_parameter")
    if fault["type"] == "union_tag_invalid":
        kind, known = str(fault["ctx"]["tag"])[:100], str(fault["ctx"]["expected_tags"]).replace("'", "")
        return ApiError(400, f"{where}: the type {kind!r} is not supported here; known are {known}", param)
    message = " ".join(str(fault["msg"]).split()).removeprefix("Value error, ")
    return ApiError(400, f"{where or 'the request body'}: {message}", param)


def _same_field(faults: Sequence[Mapping[str, Any]]) -> bool:
    return len({fault["loc"][:2] for fault in faults}) == 1


def _how_far(fault: Mapping[str, Any]) -> tuple[bool, int]:
    """How far a union branch got: one that accepts the type got further than one that does not."""
    return not fault["type"].endswith("_type"), len(fault["loc"])


def _path(names: list[str | int]) -> str:
    """("messages", 0, "role") as messages[0].role; a union's branches, with names of types or classes, are left out."""
    path = ""
    for name in names:
        if isinstance(name, int):
            path += f"[{name}]"
        elif name.isidentifier() and not (path and (name in _BRANCHES or name[0].isupper())):
            path += f".{name}" if path else name
    return path


_BRANCHES = {"str", "int", "bool", "list", "dict", "none"}
