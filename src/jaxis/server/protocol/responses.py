"""/v1/responses: text only, and nothing is stored."""

from __future__ import annotations

import time
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from jaxis.server.protocol.base import OnlyFalse, PromptTokensDetails, SamplingFields, StrictModel
from jaxis.server.protocol.chat import MAX_MESSAGES, TextFormat


class InputText(StrictModel):
    """Text of a user, or of an answer that comes back as the server sent it."""

    type: Literal["input_text", "output_text"]
    text: str
    annotations: list[Any] | None = Field(None, max_length=0)
    logprobs: list[Any] | None = Field(None, max_length=0)


class InputMessage(StrictModel):
    """One turn."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[InputText]
    id: str | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None
    phase: str | None = None


class TextOptions(StrictModel):
    """Only free text."""

    format: TextFormat | None = None


class ResponseRequest(SamplingFields):
    """A text or a conversation to answer.

    Attributes:
      input: A user's text, or turns.
      instructions: A system message before them.
      max_output_tokens: Most tokens to generate.
      metadata: Comes back with the answer.
      store: Only false has a meaning: nothing is ever stored. OpenAI's clients leave it out.
      user, safety_identifier, prompt_cache_key, service_tier: Taken, and without effect.
    """

    model: str | None = None
    input: (
        Annotated[str, Field(min_length=1)]
        | Annotated[list[InputMessage], Field(min_length=1, max_length=MAX_MESSAGES - 1)]
    )
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1, le=2**31 - 1)
    stream: bool | None = None
    text: TextOptions | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    priority: int = Field(0, ge=-(2**31), le=2**31 - 1)
    cache_salt: str | None = Field(None, min_length=1, max_length=1024)
    n: Literal[1] | None = None
    prompt_logprobs: None = None
    metadata: dict[str, str] | None = Field(None, max_length=16)
    truncation: Literal["disabled"] | None = None
    background: OnlyFalse | None = None
    store: OnlyFalse | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    service_tier: Literal["auto", "default"] | None = None

    def messages(self) -> list[dict[str, Any]]:
        """The conversation as a chat request has it."""
        turns = [InputMessage(role="user", content=self.input)] if isinstance(self.input, str) else self.input
        messages = [{"role": turn.role, "content": _text(turn.content)} for turn in turns]
        if self.instructions is not None:
            messages.insert(0, {"role": "system", "content": self.instructions})
        return messages


class OutputText(BaseModel):
    """The answer's text."""

    type: Literal["output_text"] = "output_text"
    text: str
    annotations: list[Any] = []
    logprobs: list[Any] = []


class OutputMessage(BaseModel):
    """The model's turn."""

    type: Literal["message"] = "message"
    id: str
    status: Literal["in_progress", "completed", "incomplete"]
    role: Literal["assistant"] = "assistant"
    content: list[OutputText]


class OutputTokensDetails(BaseModel):
    """Of the generated tokens, those of reasoning."""

    reasoning_tokens: int = 0


class ResponseUsage(BaseModel):
    """Token counts, under this endpoint's names."""

    input_tokens: int
    input_tokens_details: PromptTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails = Field(default_factory=OutputTokensDetails)
    total_tokens: int


class IncompleteDetails(BaseModel):
    """Why an answer is cut."""

    reason: Literal["max_output_tokens"] = "max_output_tokens"


class ResponseObject(BaseModel):
    """An answer, or how far it is."""

    id: str
    object: Literal["response"] = "response"
    created_at: int = Field(default_factory=lambda: int(time.time()))
    status: Literal["in_progress", "completed", "incomplete"]
    error: None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    metadata: dict[str, str] = {}
    model: str
    output: list[OutputMessage] = []
    parallel_tool_calls: bool = True
    previous_response_id: None = None
    store: Literal[False] = False
    temperature: float
    text: dict[str, Any] = {"format": {"type": "text"}}
    tool_choice: Literal["auto"] = "auto"
    tools: list[Any] = []
    top_p: float
    truncation: Literal["disabled"] = "disabled"
    usage: ResponseUsage | None = None


def _text(content: str | list[InputText]) -> str:
    return content if isinstance(content, str) else "\n".join(part.text for part in content)
