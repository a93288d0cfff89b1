"""Input and output items of /v1/responses: messages, reasoning, function calls and their outputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Discriminator, Field, Tag, model_validator

from jaxis.server.protocol.base import StrictModel
from jaxis.server.protocol.chat import ChatPositionLogprobs

ItemStatus = Literal["in_progress", "completed", "incomplete"]


class SentBack(StrictModel):
    """Items that clients send back as they received them, with nulls for fields that this server does not have."""

    @model_validator(mode="before")
    @classmethod
    def _without_unknown_nulls(cls, value: object) -> Any:
        if not isinstance(value, dict):
            return value
        return {key: item for key, item in value.items() if item is not None or key in cls.model_fields}


class InputText(SentBack):
    """Text of a user, or of an answer that comes back as the server sent it."""

    type: Literal["input_text", "output_text"]
    text: str
    annotations: list[Any] | None = Field(None, max_length=0)
    logprobs: list[Any] | None = None


class InputMessage(SentBack):
    """One turn."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[InputText]
    id: str | None = None
    status: ItemStatus | None = None
    phase: str | None = None


class ReasoningText(SentBack):
    """Reasoning as the model wrote it."""

    type: Literal["reasoning_text"] = "reasoning_text"
    text: str


class ReasoningItem(SentBack):
    """The model's reasoning before its answer. There are no summaries."""

    type: Literal["reasoning"] = "reasoning"
    id: str | None = None
    summary: list[Any] = Field(default=[], max_length=0)
    content: list[ReasoningText] | None = None
    encrypted_content: None = None
    status: ItemStatus | None = None


class FunctionCallItem(SentBack):
    """A call.

    Attributes:
      call_id: Identifies the call in the function's output.
      arguments: JSON text of an object.
    """

    type: Literal["function_call"] = "function_call"
    id: str | None = None
    call_id: str
    name: str
    arguments: str
    status: ItemStatus | None = None


class FunctionCallOutput(SentBack):
    """The output of a call."""

    type: Literal["function_call_output"]
    id: str | None = None
    call_id: str
    output: str | list[InputText]
    status: ItemStatus | None = None


def _item_type(value: object) -> Any:
    """The tag of an input item; an item without a type is a message."""
    return value.get("type", "message") if isinstance(value, dict) else getattr(value, "type", None)


InputItem = Annotated[
    Annotated[InputMessage, Tag("message")]
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[FunctionCallItem, Tag("function_call")]
    | Annotated[FunctionCallOutput, Tag("function_call_output")],
    Discriminator(_item_type),
]


class OutputText(BaseModel):
    """The answer's text."""

    type: Literal["output_text"] = "output_text"
    text: str
    annotations: list[Any] = []
    logprobs: list[ChatPositionLogprobs] = []


class OutputMessage(BaseModel):
    """The model's turn."""

    type: Literal["message"] = "message"
    id: str
    status: ItemStatus
    role: Literal["assistant"] = "assistant"
    content: list[OutputText]


OutputItem = OutputMessage | ReasoningItem | FunctionCallItem


def chat_messages(items: Sequence[Any]) -> list[dict[str, Any]]:
    """These items (`InputItem`) as the messages of a chat request.

    Consecutive reasoning, text and calls of an assistant become one message.
    """
    messages: list[dict[str, Any]] = []
    turn: dict[str, Any] | None = None  # the assistant's, while more items may belong to it
    for item in items:
        match item:
            case ReasoningItem():
                turn = {"role": "assistant", "reasoning_content": "".join(part.text for part in item.content or [])}
                messages.append(turn)
            case InputMessage(role="assistant"):
                if turn is None or "content" in turn or "tool_calls" in turn:
                    turn = {"role": "assistant"}
                    messages.append(turn)
                turn["content"] = text_of(item.content)
            case FunctionCallItem():
                if turn is None:
                    turn = {"role": "assistant"}
                    messages.append(turn)
                function = {"name": item.name, "arguments": item.arguments}
                turn.setdefault("tool_calls", []).append({"id": item.call_id, "function": function})
            case FunctionCallOutput():
                turn = None
                messages.append({"role": "tool", "tool_call_id": item.call_id, "content": text_of(item.output)})
            case InputMessage():
                turn = None
                messages.append({"role": item.role, "content": text_of(item.content)})
    return messages


def text_of(content: str | list[InputText]) -> str:
    """Parts as one text."""
    return content if isinstance(content, str) else "\n".join(part.text for part in content)
