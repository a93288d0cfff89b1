"""Errors and event streams, for the OpenAPI document."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from jaxis.server.protocol.messages_answer import MessageErrorResponse


class ErrorObject(BaseModel):
    """What went wrong; `param` names the request's field that is at fault, if one is."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(BaseModel):
    """OpenAI's shape of an error."""

    error: ErrorObject


_RETRY_AFTER = {"Retry-After": {"description": "Seconds to wait before trying again", "schema": {"type": "integer"}}}
_ERRORS: dict[int | str, dict[str, Any]] = {
    400: {"description": "A field that cannot be honoured; `param` names it"},
    401: {"description": "A missing or wrong API key"},
    404: {"description": "Another model, or no such route"},
    408: {"description": "A body that stops coming"},
    413: {"description": "A body that is too large"},
    429: {"description": "The queue is full", "headers": _RETRY_AFTER},
    500: {"description": "A step of the engine failed"},
    503: {"description": "The server is shutting down, or its engine has failed", "headers": _RETRY_AFTER},
    504: {"description": "The answer took too long"},
    "default": {"description": "Any other error"},  # with it FastAPI documents no 422 of its own, which is never sent
}
_ANSWER = {"description": "The answer; with `stream` as server-sent events", "content": {"text/event-stream": {}}}


def _responses(*statuses: int | str, model: type[BaseModel] = ErrorResponse) -> dict[int | str, dict[str, Any]]:
    return {status: {"model": model, **_ERRORS[status]} for status in statuses}


LOOKUP_ERRORS = _responses(401, 404, "default")
ADMIN_ERRORS = _responses(401, 503, "default") | {403: {"model": ErrorResponse, "description": "A key without `admin`"}}
TEXT_ERRORS = _responses(400, 401, 404, 408, 413, "default")
GENERATION_RESPONSES = _responses(*_ERRORS) | {200: _ANSWER}
MESSAGE_COUNT_ERRORS = _responses(400, 401, 404, 408, 413, "default", model=MessageErrorResponse)
MESSAGE_RESPONSES = _responses(*_ERRORS, model=MessageErrorResponse) | {200: _ANSWER}
