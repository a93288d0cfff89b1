"""Errors and signs of life of /v1/messages, in whole answers and in streams."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from jaxis.errors import ContextLengthError, RequestError
from jaxis.host.logs import current_request_id
from jaxis.server.http.errors import ApiError, ErrorDialect, StreamForm

_INLINE_TOOL = "messages[].content[].tool.definition"
_ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class MessageEvents(StreamForm):
    media_type = "text/event-stream"

    def keep_alive(self) -> str:
        """Returns an event that clients take as a sign of life only."""
        return message_event({"type": "ping"})

    def failure(self, error: ApiError) -> str:
        return message_event(MESSAGE_ERRORS.body(error))


def message_event(event: Mapping[str, Any]) -> str:
    return f"event: {event['type']}\ndata: {json.dumps(event)}\n\n"


class _MessageErrors(ErrorDialect):
    """Anthropic's errors: a type and a message, which names the field."""

    def own(self, error: RequestError) -> RequestError:
        if isinstance(error, ContextLengthError):
            # Claude Code compacts the conversation when it reads this.
            return RequestError(f"prompt is too long: {error.num_prompt_tokens} tokens > {error.max_model_len} maximum")
        return super().own(error)

    def body(self, error: ApiError) -> dict[str, Any]:
        """Returns the error object, with the id of the current request."""
        kind = _ERROR_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
        fault = {"type": kind, "message": error.message}
        return {"type": "error", "error": fault, "request_id": current_request_id.get()}

    def empty_stream(self, path: str, body: Mapping[str, Any], model: str) -> StreamForm | None:  # noqa: ARG002
        return MessageEvents() if body.get("stream") is True else None


MESSAGE_ERRORS = _MessageErrors(
    prefixes=("/v1/messages",),
    fields={
        "stop": "stop_sequences",
        "thinking_token_budget": "thinking.budget_tokens",
        "tools[].parameters": "tools[].input_schema",
        f"{_INLINE_TOOL}.parameters": f"{_INLINE_TOOL}.input_schema",
    },
    request_id_headers=("Request-Id",),
)
