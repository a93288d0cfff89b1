"""Tools of /v1/messages: functions, and the choice between them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Tag, model_validator

from jaxis.server.protocol.base import LenientModel, StrictModel
from jaxis.server.protocol.type_tags import tag_by_type


class ToolDefinition(LenientModel):
    """A tool of the client; Anthropic's own, which have a dated type, are left out.

    Attributes:
      type: Absent or "custom" for a function.
      name: As in `FunctionDefinition`.
      input_schema: JSON schema of an object with the arguments.
      defer_loading: The model learns of the tool from a message, not from the list of tools.
      cache_control, strict, eager_input_streaming, input_examples, allowed_callers: Accepted without effect.
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
        """Whether it is a function of the client."""
        return self.type in (None, "custom")

    @model_validator(mode="after")
    def _has_a_schema(self) -> ToolDefinition:
        if self.is_function and self.input_schema is None:
            raise ValueError("input_schema is missing: send the JSON schema of the tool's arguments")
        return self


class AutoChoice(StrictModel):
    """The model may call tools."""

    type: Literal["auto"]
    disable_parallel_tool_use: bool | None = None


class AnyChoice(StrictModel):
    """The model must call a tool."""

    type: Literal["any"]
    disable_parallel_tool_use: bool | None = None


class NamedChoice(StrictModel):
    """The model must call this tool."""

    type: Literal["tool"]
    name: str
    disable_parallel_tool_use: bool | None = None


class NoChoice(StrictModel):
    """The model must not call tools."""

    type: Literal["none"]


_CHOICES = {"auto": "AutoChoice", "any": "AnyChoice", "tool": "NamedChoice", "none": "NoChoice"}
ToolChoice = Annotated[
    Annotated[AutoChoice, Tag("AutoChoice")]
    | Annotated[AnyChoice, Tag("AnyChoice")]
    | Annotated[NamedChoice, Tag("NamedChoice")]
    | Annotated[NoChoice, Tag("NoChoice")],
    Discriminator(
        tag_by_type(_CHOICES),
        custom_error_type="unknown_tool_choice",
        custom_error_message="type must be auto, any, tool or none",
    ),
]
