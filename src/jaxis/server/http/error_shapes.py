"""The shape of an error in each protocol, by the path of the request."""

from __future__ import annotations

from typing import Any

from jaxis.host.logs import current_request_id

ANTHROPIC_PATHS = "/v1/messages"
OLLAMA_PATHS = "/api/"
_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def is_anthropic(path: str) -> bool:
    """Whether clients of this path expect Anthropic's shape."""
    return path == ANTHROPIC_PATHS or path.startswith(ANTHROPIC_PATHS + "/")


def anthropic_error(status: int, message: str) -> dict[str, Any]:
    """Anthropic's error object, with the id of the request that is being answered."""
    kind = _ANTHROPIC_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": message}, "request_id": current_request_id.get()}
