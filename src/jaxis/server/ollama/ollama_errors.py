"""Errors and signs of life of Ollama's API, in whole answers and in streams."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from jaxis.errors import RequestError
from jaxis.server.generation.answer_format import ToolsNotSupportedError
from jaxis.server.generation.model_info import rfc3339
from jaxis.server.http.errors import ApiError, ErrorDialect, StreamForm

NDJSON = "application/x-ndjson"
SAME_NAME = (
    *("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "stop"),
    "thinking_token_budget",
)
"""Names of parameters that are the same in Ollama's options."""


class OllamaLines(StreamForm):
    """Form of Ollama's streams: lines of JSON."""

    media_type = NDJSON

    def failure(self, error: ApiError) -> str:
        return json.dumps(OLLAMA_ERRORS.body(error)) + "\n"


class _EmptyLines(OllamaLines):
    """Lines of /api/chat and /api/generate before the answer has begun."""

    def __init__(self, path: str, model: str) -> None:
        self._model = model
        message = {"message": {"role": "assistant", "content": ""}}
        self._empty: Mapping[str, Any] = message if path.endswith("/chat") else {"response": ""}

    def keep_alive(self) -> str:
        """Returns a line that says only that the answer is still coming."""
        head = {"model": self._model, "created_at": rfc3339(datetime.now(UTC)), "done": False}
        return json.dumps({**head, **self._empty}) + "\n"


class _OllamaErrors(ErrorDialect):
    """Ollama's errors: a message, which names the field."""

    def own(self, error: RequestError) -> RequestError:
        if isinstance(error, ToolsNotSupportedError):
            return RequestError(f"{error.model!r} does not support tools: {error}")  # clients look for these words
        return super().own(error)

    def body(self, error: ApiError) -> dict[str, Any]:
        return {"error": error.body()["error"]["message"]}

    def empty_stream(self, path: str, body: Mapping[str, Any], model: str) -> StreamForm | None:
        return None if body.get("stream") is False else _EmptyLines(path, body.get("model") or model)


OLLAMA_ERRORS = _OllamaErrors(
    prefixes=("/api",),
    fields={
        **{name: f"options.{name}" for name in (*SAME_NAME, "top_k", "seed")},
        "repetition_penalty": "options.repeat_penalty",
        "max_tokens": "options.num_predict",
        "reasoning_effort": "think",
    },
)
