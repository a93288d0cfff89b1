"""Answers of /v1/messages: the message, its events' counts, and errors in Anthropic's shape."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class AnswerText(BaseModel):
    """Text."""

    type: Literal["text"] = "text"
    text: str


class AnswerThinking(BaseModel):
    """Reasoning; the signature means nothing, and is not checked when it comes back."""

    type: Literal["thinking"] = "thinking"
    thinking: str
    signature: str


class AnswerToolUse(BaseModel):
    """A call. The last one of an answer that was cut off has those arguments that were complete."""

    type: Literal["tool_use"] = "tool_use"
    id: str
    name: str
    input: dict[str, Any]


class OutputTokensDetails(BaseModel):
    """How many of the generated tokens are reasoning."""

    thinking_tokens: int = 0


class MessageUsage(BaseModel):
    """Token counts. The prompt is `input_tokens` and `cache_read_input_tokens` together."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int
    cache_creation_input_tokens: int = 0
    output_tokens_details: OutputTokensDetails = OutputTokensDetails()


class AnswerMessage(BaseModel):
    """The model's turn.

    Attributes:
      stop_reason: None in the event that begins a stream.
      stop_sequence: The one of `stop_sequences` that ended it.
    """

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[AnswerText | AnswerThinking | AnswerToolUse] = []
    stop_reason: StopReason | None = None
    stop_sequence: str | None = None
    usage: MessageUsage


class TokenCount(BaseModel):
    """The tokens of a prompt."""

    input_tokens: int


class MessageErrorObject(BaseModel):
    """What went wrong."""

    type: str
    message: str


class MessageErrorResponse(BaseModel):
    """Anthropic's shape of an error; the id is that of the `request-id` header."""

    type: Literal["error"] = "error"
    error: MessageErrorObject
    request_id: str | None
