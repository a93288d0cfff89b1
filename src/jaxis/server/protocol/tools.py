"""Functions that a model may call, and its calls, as the chat endpoint writes them."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field

from jaxis.server.protocol.base import LenientModel, StrictModel, is_none


class FunctionDefinition(LenientModel):
    """A function.

    Attributes:
      name: Letters, digits, `_`, `-` and `.`; at most 128.
      parameters: JSON schema of an object with the arguments; None is a function without.
      strict: Accepted without effect: with tool_choice "required" or a named function arguments always follow the
        schema, with "auto" they are the model's.
    """

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(LenientModel):
    """A tool; only functions are supported."""

    type: Literal["function"]
    function: FunctionDefinition


class DeferredTool(Tool):
    """A tool that may be called, but that stands in a message of the conversation and not in the template's list.

    The list is at the head of the prompt: a tool that joins it later would cost everything that is cached.
    """


class FunctionName(StrictModel):
    """Which function to call."""

    name: str


class NamedToolChoice(StrictModel):
    """The one function that must be called."""

    type: Literal["function"]
    function: FunctionName


class FunctionCall(LenientModel):
    """A function's name, and its arguments as JSON text."""

    name: str
    arguments: str


class ChatToolCall(LenientModel):
    """A call. `index` is left over from streamed calls that clients send back, and is ignored."""

    id: str | None = None
    type: Literal["function"] | None = "function"
    function: FunctionCall
    index: int | None = Field(default=None, exclude_if=is_none)


class FunctionCallDelta(BaseModel):
    """The name comes with the call's first chunk; the arguments of all chunks add up."""

    name: str | None = Field(default=None, exclude_if=is_none)
    arguments: str | None = Field(default=None, exclude_if=is_none)


class ChatToolCallDelta(BaseModel):
    """A chunk's addition to the call with this index; the first chunk has its id and name."""

    index: int
    id: str | None = Field(default=None, exclude_if=is_none)
    type: Literal["function"] | None = Field(default=None, exclude_if=is_none)
    function: FunctionCallDelta
