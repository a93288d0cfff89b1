"""Input and output items of /v1/responses: messages, reasoning, calls of tools and their outputs.

Clients send items back as they received them, or as another server wrote them.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag

from jaxis.server.http.body import LenientModel, NotApplied, is_none, type_of
from jaxis.server.openai.fields import ArgumentsText, RefusalPart
from jaxis.server.openai.logprobs import ChatPositionLogprobs

MAX_ID = 128
ItemStatus = Literal["in_progress", "completed", "incomplete"]


def _no_chat_image(part_type: object) -> object:
    if part_type in ("image", "image_url"):
        raise ValueError(f"an image's type is input_image here, not {part_type!r}")
    return part_type


class InputText(LenientModel):
    """Text of a user, or of an answer that is sent back."""

    type: Annotated[Literal["input_text", "output_text"], BeforeValidator(_no_chat_image)]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class InputImage(LenientModel):
    """An image.

    Attributes:
      image_url: A data: URL, such as data:image/png;base64,...
    """

    not_applied: ClassVar[dict[str, NotApplied]] = {
        "file_id": NotApplied(advice="no files are kept here: send image_url, a data: URL"),
    }

    type: Literal["input_image"]
    image_url: str | None = None
    detail: str | None = Field(default=None, exclude_if=is_none)


_TAGS = {"input_image": "Image", "refusal": "Refusal"}
InputPart = Annotated[
    Annotated[InputText, Tag("Text")] | Annotated[InputImage, Tag("Image")] | Annotated[RefusalPart, Tag("Refusal")],
    Discriminator(lambda value: _TAGS.get(type_of(value), "Text")),
]


class InputMessage(LenientModel):
    """One turn. Only turns of users may have images."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[InputPart]
    id: str | None = None
    status: ItemStatus | None = None
    phase: str | None = None


class ReasoningText(LenientModel):
    """Reasoning as the model wrote it."""

    type: Literal["reasoning_text"] = "reasoning_text"
    text: str


class SummaryText(LenientModel):
    """A summary of reasoning by another server."""

    type: Literal["summary_text"] = "summary_text"
    text: str


class ReasoningItem(LenientModel):
    """The model's reasoning before its answer.

    Attributes:
      summary: Summaries by other servers, which are read if there is no content.
      encrypted_content: Content encrypted by another server, which this one cannot read.
    """

    not_applied: ClassVar[dict[str, NotApplied]] = {"encrypted_content": NotApplied(neutral=("",))}

    type: Literal["reasoning"] = "reasoning"
    id: str | None = None
    summary: list[SummaryText] | None = Field(default_factory=list)
    content: list[ReasoningText] | None = None
    encrypted_content: str | None = None
    status: ItemStatus | None = None

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.content or self.summary or ())


class FunctionCallItem(LenientModel):
    """A call of a function.

    Attributes:
      call_id: Id that the call's output refers to.
      namespace: Namespace of the function, if any.
    """

    type: Literal["function_call"] = "function_call"
    id: str | None = None
    call_id: str
    name: str
    namespace: str | None = Field(default=None, exclude_if=is_none)
    arguments: ArgumentsText
    status: ItemStatus | None = None


class CustomToolCallItem(LenientModel):
    """A call of a custom tool; `input` is plain text."""

    type: Literal["custom_tool_call"] = "custom_tool_call"
    id: str | None = None
    call_id: str
    name: str
    namespace: str | None = Field(default=None, exclude_if=is_none)
    input: str
    status: ItemStatus | None = None


class ToolCallOutput(LenientModel):
    type: Literal["function_call_output", "custom_tool_call_output"]
    id: str | None = None
    call_id: str
    output: str | list[InputPart]
    status: ItemStatus | None = None


class HostedCall(BaseModel):
    """A call of a tool that another server ran. It is left out; that server's next message has its result."""

    model_config = ConfigDict(extra="ignore", strict=True)

    type: Literal["web_search_call", "file_search_call", "image_generation_call", "mcp_list_tools"]


class ItemReference(LenientModel):
    """An item that is stored on this server."""

    type: Literal["item_reference"] = "item_reference"
    id: Annotated[str, Field(min_length=1, max_length=MAX_ID)]


def _item_type(value: object) -> Any:
    """Returns the tag of an input item. An item without a type is a message, or a reference if it has only an id."""
    if not isinstance(value, dict):
        return getattr(value, "type", None)
    is_reference = "id" in value and "role" not in value and "content" not in value
    return value.get("type", "item_reference" if is_reference else "message")


InputItem = Annotated[
    Annotated[InputMessage, Tag("message")]
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[FunctionCallItem, Tag("function_call")]
    | Annotated[ToolCallOutput, Tag("function_call_output")]
    | Annotated[CustomToolCallItem, Tag("custom_tool_call")]
    | Annotated[ToolCallOutput, Tag("custom_tool_call_output")]
    | Annotated[ItemReference, Tag("item_reference")]
    | Annotated[HostedCall, Tag("web_search_call")]
    | Annotated[HostedCall, Tag("file_search_call")]
    | Annotated[HostedCall, Tag("image_generation_call")]
    | Annotated[HostedCall, Tag("mcp_list_tools")],
    Discriminator(_item_type),
]


class OutputText(BaseModel):
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


OutputItem = OutputMessage | ReasoningItem | FunctionCallItem | CustomToolCallItem


def text_of(content: str | list[InputPart]) -> str:
    """Returns the texts of parts as one string."""
    if isinstance(content, str):
        return content
    return "\n".join(part.text for part in content if isinstance(part, InputText | RefusalPart))
