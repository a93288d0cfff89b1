"""Errors, for the OpenAPI document."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel


class ErrorObject(BaseModel):
    """What went wrong; `param` names the request's field that is at fault, if one is."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(BaseModel):
    """OpenAI's shape of an error."""

    error: ErrorObject


def _responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    return {status: {"model": ErrorResponse} for status in statuses}


GENERATION_ERRORS = _responses(400, 401, 404, 408, 413, 422, 429, 500, 503, 504)
TEXT_ERRORS = _responses(400, 401, 404, 408, 413, 422)
