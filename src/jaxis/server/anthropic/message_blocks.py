"""Contents of the turns of /v1/messages: blocks, their text for the model, images, and tools."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from jaxis.server.http.body import LenientModel


class ContentBlock(LenientModel):
    """A part of a turn.

    Attributes:
      cache_control: Accepted without effect, since every prefix is cached.
    """

    cache_control: Any = None


class TextBlock(ContentBlock):
    """Text. `citations` of an answer may be sent back; the model does not see them."""

    type: Literal["text"]
    text: str
    citations: Any = None


class TextSource(LenientModel):
    """A document's text."""

    type: Literal["text"]
    data: str
    media_type: Literal["text/plain"] | None = None


class BlocksSource(LenientModel):
    """A document made of text blocks."""

    type: Literal["content"]
    content: str | list[TextBlock]


class DocumentBlock(ContentBlock):
    """A document, as text. No files or addresses are read."""

    type: Literal["document"]
    source: Annotated[TextSource | BlocksSource, Field(discriminator="type")]
    title: str | None = None
    context: str | None = None
    citations: Any = None


class Base64Source(LenientModel):
    """A file of an image in base64. Its type is read from the file; `media_type` has no effect."""

    type: Literal["base64"]
    data: str
    media_type: str | None = None


class UrlSource(LenientModel):
    """URL of an image's file."""

    type: Literal["url"]
    url: str


class ImageBlock(ContentBlock):
    type: Literal["image"]
    source: Annotated[Base64Source | UrlSource, Field(discriminator="type")]


class SearchResultBlock(ContentBlock):
    """A result of a search by the client."""

    type: Literal["search_result"]
    source: str
    title: str
    content: list[TextBlock]
    citations: Any = None


class ToolReferenceBlock(ContentBlock):
    """A tool that the model may call from now on, in the result of the tool that found it."""

    type: Literal["tool_reference"]
    tool_name: str


class ToolResultBlock(ContentBlock):
    """Result of a call.

    Attributes:
      content: A string, or blocks (`ResultBlock`).
      is_error: True if the call failed; the text then describes the error.
    """

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | list[ResultBlock] | None = None
    is_error: bool | None = None
    caller: Any = None


class ThinkingBlock(ContentBlock):
    """Reasoning of the model, as it was sent. Signatures are not checked."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class RedactedThinkingBlock(ContentBlock):
    """Encrypted reasoning of another server, which is left out."""

    type: Literal["redacted_thinking"]
    data: str


class ToolUseBlock(ContentBlock):
    """A call by the model."""

    type: Literal["tool_use"]
    id: Annotated[str, Field(min_length=1, max_length=512)]
    name: str
    input: dict[str, Any]
    caller: Any = None
    toolset_name: Any = None


class ToolDefinition(LenientModel):
    """A tool of the client. Anthropic's own tools, which have a dated type, are left out.

    Attributes:
      type: None or "custom" for a function.
      name: Name of the function, with the limits of `FunctionDefinition`.
      input_schema: JSON schema of an object with the arguments.
      defer_loading: True if the model learns of the tool from a message instead of the list of tools.
      strict: True if calls follow the schema even when the model is free to call.
      cache_control, eager_input_streaming, input_examples, allowed_callers: Accepted without effect.
    """

    type: str | None = None
    name: str
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    defer_loading: bool | None = None
    strict: bool | None = None
    cache_control: Any = None
    eager_input_streaming: Any = None
    input_examples: Any = None
    allowed_callers: Any = None

    @property
    def is_function(self) -> bool:
        return self.type in (None, "custom")

    @model_validator(mode="after")
    def _has_a_schema(self) -> ToolDefinition:
        if self.is_function and self.input_schema is None:
            raise ValueError("input_schema is missing: send the JSON schema of the tool's arguments")
        return self


class ToolReference(LenientModel):
    """Name of a tool."""

    type: Literal["tool_reference"]
    name: str


class InlineTool(LenientModel):
    """A tool defined in the middle of a conversation."""

    type: Literal["tool_definition"]
    definition: ToolDefinition


class ToolAdditionBlock(ContentBlock):
    """A tool that the model may call from now on."""

    type: Literal["tool_addition"]
    tool: Annotated[ToolReference | InlineTool, Field(discriminator="type")]


class ToolRemovalBlock(ContentBlock):
    """A tool that the model must no longer call."""

    type: Literal["tool_removal"]
    tool: ToolReference


_TYPES_OF_ROLE = {
    "user": ("text", "image", "document", "search_result", "tool_result"),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
    "system": ("text", "tool_addition", "tool_removal"),
}
ResultBlock = Annotated[
    TextBlock | ImageBlock | DocumentBlock | SearchResultBlock | ToolReferenceBlock, Field(discriminator="type")
]
Block = Annotated[
    TextBlock
    | ImageBlock
    | DocumentBlock
    | SearchResultBlock
    | ToolResultBlock
    | ThinkingBlock
    | RedactedThinkingBlock
    | ToolUseBlock
    | ToolAdditionBlock
    | ToolRemovalBlock,
    Field(discriminator="type"),
]
ToolResultBlock.model_rebuild()


def check_role(role: str, blocks: Iterable[Any]) -> None:
    """Raises ValueError if a message of this role cannot hold one of the blocks (`Block`)."""
    for index, block in enumerate(blocks):
        if block.type not in _TYPES_OF_ROLE[role]:
            raise ValueError(f"content[{index}] is a {block.type} block, which a message of role {role!r} cannot hold")


def joined(texts: Iterable[str]) -> str:
    """Joins texts of blocks, each on lines of its own."""
    text = ""
    for part in texts:
        text += "\n" if text and part and not text.endswith("\n") else ""
        text += part
    return text


def text_of(block: TextBlock | DocumentBlock | SearchResultBlock) -> str:
    """Returns a block as text."""
    match block:
        case TextBlock():
            return block.text
        case SearchResultBlock():
            return joined([block.title, block.source, *(part.text for part in block.content)])
        case DocumentBlock(source=TextSource(data=data)):
            body = data
        case DocumentBlock(source=BlocksSource(content=str(content))):
            body = content
        case DocumentBlock(source=BlocksSource(content=list(parts))):
            body = joined(part.text for part in parts)
    return joined([block.title or "", block.context or "", body])
