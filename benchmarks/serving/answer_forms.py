"""What the answers of every protocol are compared as."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Protocol

# "choices": {index: {"text", "tool_calls", "finish_reason", "logprobs"}}, and the token counts
Answer = dict[str, Any]


class FailedError(Exception):
    """The server answered with something that is neither an answer nor a refusal."""


class AnswerForm(Protocol):
    """How a protocol writes its answers.

    Attributes:
      stream_fields: What a request for a stream has besides `stream`.
    """

    stream_fields: ClassVar[Mapping[str, Any]]

    def whole(self, answer: dict[str, Any]) -> Answer:
        """The answer of a response's JSON."""
        ...

    def folded(self, lines: Sequence[bytes]) -> Answer:
        """The answer of a stream's lines; raises FailedError unless it ends as it should."""
        ...


def make_answer(choices: dict[int, dict[str, Any]], num_prompt_tokens: int, num_completion_tokens: int) -> Answer:
    """The comparable form."""
    return {
        "choices": dict(sorted(choices.items())),
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_completion_tokens,
    }


def sse_events(lines: Sequence[bytes]) -> list[dict[str, Any]]:
    """The data of server-sent events, comments and `[DONE]` left out."""
    events = [json.loads(line[6:]) for line in lines if line.startswith(b"data: ") and line[6:].strip() != b"[DONE]"]
    for event in events:
        if event.get("error"):
            raise FailedError(f"an error in the stream: {event['error']}")
    return events
