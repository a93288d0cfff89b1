"""Errors of /v1/responses, in whole answers and in streams that have not begun."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from jaxis.server.http.errors import ApiError, DataEvents, ErrorDialect, StreamForm


class _EmptyResponse(DataEvents):
    """Form of a stream before its first event: clients know that event by its place, so signs of life are comments."""

    def failure(self, error: ApiError) -> str:
        body = error.body()["error"]
        event = {"type": "error", "sequence_number": 0, **{name: body[name] for name in ("code", "message", "param")}}
        return f"event: error\ndata: {json.dumps(event)}\n\n"


class _ResponseErrors(ErrorDialect):
    """OpenAI's errors, with this endpoint's names of fields."""

    def empty_stream(self, path: str, body: Mapping[str, Any], model: str) -> StreamForm | None:  # noqa: ARG002
        return _EmptyResponse() if body.get("stream") is True else None


RESPONSE_ERRORS = _ResponseErrors(
    prefixes=("/v1/responses",),
    fields={"messages": "input", "max_tokens": "max_output_tokens", "reasoning_effort": "reasoning"},
)
