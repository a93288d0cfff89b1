"""Errors as clients see them, as whole answers and in streams, in OpenAI's form or in another protocol's dialect."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.routing import Route
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
from jaxis.nearest_name import nearest_name

DONE = "data: [DONE]\n\n"
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
_MAX_MESSAGE_CHARACTERS = 1000  # a message may quote the request


_INDEX = re.compile(r"\[\d+\]")


@dataclass(frozen=True)
class ApiError:
    """An error as the client sees it.

    Attributes:
      message: Message in one line.
      param: Field of the request that is at fault, if any.
      code: Identifier for programs, if any.
      headers: Additional headers of the response.
    """

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    def body(self) -> dict[str, Any]:
        """Returns OpenAI's error object."""
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        message = self.message
        if len(message) > _MAX_MESSAGE_CHARACTERS:
            message = message[: _MAX_MESSAGE_CHARACTERS // 2] + " ... " + message[-_MAX_MESSAGE_CHARACTERS // 2 :]
        return {"error": {"message": message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        """Returns the error as a whole answer, in the dialect of the request's path."""
        return _ErrorResponse(self)


class StreamForm(Protocol):
    """Form of a protocol's streams, apart from the answer itself. `media_type` is the content type."""

    media_type: str

    def keep_alive(self) -> str:
        """Returns a sign of life for a client that waits, between events or before the first one."""
        ...

    def failure(self, error: ApiError) -> str:
        """Returns the end of a stream that has failed."""
        ...


class DataEvents(StreamForm):
    """Form of the streams of chat and text completions."""

    media_type = "text/event-stream"

    def keep_alive(self) -> str:
        return ": keep-alive\n\n"

    def failure(self, error: ApiError) -> str:
        return f"data: {json.dumps(error.body())}\n\n{DONE}"


@dataclass(frozen=True, kw_only=True)
class ErrorDialect:
    """Form of errors in a protocol. This class has OpenAI's form.

    Attributes:
      prefixes: First parts of the protocol's paths.
      fields: Names of parameters in the protocol's requests, if they differ; "[]" stands for any index.
      request_id_headers: Headers in which the protocol's clients expect the request's id, in addition to X-Request-Id.
    """

    prefixes: tuple[str, ...] = ()
    fields: Mapping[str, str] = field(default_factory=dict)
    request_id_headers: tuple[str, ...] = ()

    def own(self, error: RequestError) -> RequestError:
        """Returns an error about a parameter as one about the field that the client sent."""
        if error.param is None or isinstance(error, RefusedFieldError):
            return error
        name = self._own_name(error.param)
        return error if name == error.param else error.about(name)

    def body(self, error: ApiError) -> dict[str, Any]:
        """Returns the error object."""
        return error.body()

    def has(self, path: str) -> bool:
        return any(path == prefix or path.startswith(f"{prefix}/") for prefix in self.prefixes)

    def empty_stream(self, path: str, body: Mapping[str, Any], model: str) -> StreamForm | None:  # noqa: ARG002
        """Returns the form of a stream whose answer has not begun; None if a request asks for no stream.

        Args:
          path: Path of the request.
          body: JSON object of the request.
          model: Name of the model for which the request waits.
        """
        return DataEvents() if body.get("stream") is True else None

    def _own_name(self, param: str) -> str:
        indices = iter(_INDEX.findall(param))
        plain = _INDEX.sub("[]", param)
        for name in sorted(self.fields, key=len, reverse=True):
            if plain == name or plain.startswith((f"{name}.", f"{name}[")):
                plain = self.fields[name] + plain.removeprefix(name)
                break
        return re.sub(r"\[\]", lambda _: next(indices), plain)


OPENAI_ERRORS = ErrorDialect()


def error_dialect(scope: Scope) -> ErrorDialect:
    dialects = scope["app"].state.error_dialects if "app" in scope else ()
    return next((dialect for dialect in dialects if dialect.has(scope["path"])), OPENAI_ERRORS)


class _ErrorResponse(Response):
    def __init__(self, error: ApiError) -> None:
        super().__init__(status_code=error.status, headers=dict(error.headers))
        self._error = error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = error_dialect(scope).body(self._error)
        whole = JSONResponse(body, status_code=self._error.status, headers=dict(self._error.headers))
        await whole(scope, receive, send)


class ModelNotFoundError(RequestError):
    """The requested model is not served here."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.param = "model"


class ObjectNotFoundError(RequestError):
    """The requested object is not stored here, or belongs to another API key.

    Attributes:
      param: Field that names the object; None if the path names it.
    """

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class RefusedFieldError(RequestError):
    """The field is not applied and cannot be ignored. The error has the name that the client sent."""


class UnknownFieldError(RefusedFieldError):
    """The field is most likely misspelt, or is unknown to a server that refuses unknown fields."""


class UnsupportedFieldError(RefusedFieldError):
    """The field would change the answer."""


# Status and code by type of error, the most specific type first.
_ANSWERS: Mapping[type[JaxisError], tuple[int, str | None]] = {
    ModelNotFoundError: (404, "model_not_found"),
    ObjectNotFoundError: (404, "not_found"),
    UnknownFieldError: (400, "unknown_parameter"),
    UnsupportedFieldError: (400, "unsupported_parameter"),
    ContextLengthError: (400, "context_length_exceeded"),
    RateLimitError: (429, "rate_limit_exceeded"),
    OverloadedError: (429, "server_overloaded"),
    UnavailableError: (503, "server_unavailable"),
    DeadlineExceededError: (504, "request_timeout"),
    EngineError: (500, "engine_error"),
    JaxisError: (400, None),
}


def api_error(error: Exception, dialect: ErrorDialect = OPENAI_ERRORS) -> ApiError:
    """Returns the client's view of an exception. Unexpected ones are logged, and their details are not sent."""
    if isinstance(error, JaxisError):
        return _jaxis_error(error, dialect)
    if isinstance(error, RequestValidationError):
        return _validation_error(error)
    if isinstance(error, HTTPException):
        return ApiError(error.status_code, str(error.detail), headers=error.headers or {})
    _logger.error("a request failed inside the server", exc_info=error)
    return ApiError(500, "the server has a fault, described in its log", code="internal_error")


def _jaxis_error(error: JaxisError, dialect: ErrorDialect) -> ApiError:
    status, code = next(answer for kind, answer in _ANSWERS.items() if isinstance(error, kind))
    if isinstance(error, RequestError):
        own = dialect.own(error)
        param = None if own.param is None else re.split(r"[.\[]", own.param, maxsplit=1)[0]
        return ApiError(status, str(own), param, code)
    headers = {}
    if isinstance(error, OverloadedError):
        headers["Retry-After"] = str(error.retry_after_seconds)
    elif isinstance(error, UnavailableError):
        headers["Retry-After"] = "5"
    return ApiError(status, str(error), code=code, headers=headers)


class FaultMiddleware:
    """Turns unexpected exceptions into error objects. It is innermost, so that other middleware adds its headers."""

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
            await api_error(error, error_dialect(scope)).response()(scope, receive, send)


def install_error_handlers(app: FastAPI) -> None:
    """Makes every error of the application's routes an error object. Call it before adding other middleware."""

    async def handle(request: Request, error: Exception) -> Response:
        if isinstance(error, HTTPException) and error.detail in _OF_ROUTER:
            return route_error(app, request.scope["path"], request.method).response()
        return api_error(error, error_dialect(request.scope)).response()

    for kind in (JaxisError, RequestValidationError, HTTPException):
        app.add_exception_handler(kind, handle)
    app.add_middleware(FaultMiddleware)


_OF_ROUTER = ("Not Found", "Method Not Allowed")  # Starlette's details if no route answers


def route_error(app: FastAPI, path: str, method: str) -> ApiError:
    """Returns the error for a path and method without a route. It names the path's methods, or a similar path."""
    routes = [route for route in (*app.routes, *app.state.routes) if isinstance(route, Route)]
    allowed = {name for route in routes if route.path_regex.match(path) for name in route.methods or ()}
    if allowed - {method}:
        names = ", ".join(sorted(allowed))
        return ApiError(405, f"{path[:100]!r} does not take {method[:20]}: use {names}", headers={"Allow": names})
    parts = [part for part in path.split("/") if part]
    ends = ["/" + "/".join(parts[start:]) for start in range(max(1, len(parts) - 1))]
    candidates = [each for end in ends for each in (f"/v1{end}", end)]
    meant = next((each for each in candidates if any(route.path_regex.match(each) for route in routes)), None)
    if meant == f"/v1{path}":
        return ApiError(404, f"there is no {path[:100]!r}: /v1 is missing, call {meant}")
    if meant is None:
        known = [route.path for route in routes if "{" not in route.path]
        meant = nearest_name(path, known)
    advice = "/openapi.json lists what there is" if meant is None else f"did you mean {meant[:100]}?"
    return ApiError(404, f"there is no {path[:100]!r} here: {advice}")


def _validation_error(error: RequestValidationError) -> ApiError:
    """Returns pydantic's first error in one line; of a union's errors, that of the branch that got furthest."""
    faults = error.errors()
    fault = max(faults, key=_how_far) if len(faults) > 1 and _same_field(faults) else faults[0]
    names = _names(fault, error.body)
    where = "".join(f"[{name}]" if isinstance(name, int) else f".{name}" for name in names).removeprefix(".")
    param = str(names[0]) if names and isinstance(names[0], str) else None
    if fault["type"] == "extra_forbidden":
        return ApiError(400, f"{where} is not a known parameter: leave it out", param, "unknown_parameter")
    if fault["type"] == "missing":
        message = f"{where} is missing" if where else "the body is empty: send a JSON object"
        return ApiError(400, message, param, "missing_parameter")
    if fault["type"] == "union_tag_not_found":
        return ApiError(400, f"{where}.type is missing", param, "missing_parameter")
    if fault["type"] == "union_tag_invalid":
        kind, known = str(fault["ctx"]["tag"])[:100], str(fault["ctx"]["expected_tags"]).replace("'", "")
        return ApiError(400, f"{where}: the type {kind!r} is not supported here; known are {known}", param)
    message = " ".join(str(fault["msg"]).split()).removeprefix("Value error, ")
    return ApiError(400, f"{where or 'the request body'}: {message}", param)


def _same_field(faults: Sequence[Mapping[str, Any]]) -> bool:
    return len({fault["loc"][:2] for fault in faults}) == 1


def _how_far(fault: Mapping[str, Any]) -> tuple[bool, int]:
    """Returns a rank of union branches: a branch that accepts the type ranks above one that does not."""
    return not fault["type"].endswith("_type"), len(fault["loc"])


def _names(fault: Mapping[str, Any], body: Any) -> list[str | int]:
    """Returns the fields and indices that lead to a fault; pydantic puts the branches of unions between them."""
    source, *loc = fault["loc"]
    if source != "body":
        return loc
    names: list[str | int] = []
    for place, name in enumerate(loc, 1):
        is_missing = fault["type"] == "missing" and place == len(loc)
        if is_missing or (name in body if isinstance(body, dict) else isinstance(body, list) and isinstance(name, int)):
            names.append(name)
            body = None if is_missing else body[name]
    return names
