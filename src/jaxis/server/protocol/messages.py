"""/v1/messages: Anthropic's request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from jaxis.sampling_params import INTEGER_BOUNDS, NUMBER_BOUNDS
from jaxis.server.protocol.base import MAX_INT32, LenientModel, StrictModel, bounded
from jaxis.server.protocol.chat import MAX_MESSAGES
from jaxis.server.protocol.message_blocks import Block, TextBlock, check_role
from jaxis.server.protocol.message_tools import ToolChoice, ToolDefinition
from jaxis.server.protocol.not_applied import NotApplied
from jaxis.server.protocol.type_tags import tag_by_type

MIN_THINKING_BUDGET = 1024


class MessageParam(LenientModel):
    """One turn.

    Attributes:
      role: "system" may stand anywhere.
      content: A string is one text block.
      clear_at: Of a system message: "next_user_message" shows it only until the user says more.
      output_config: Of a system message, from Claude Code: the request's own counts.
    """

    role: Literal["user", "assistant", "system"]
    content: str | list[Block]
    clear_at: Literal["next_user_message", "never"] | None = None
    output_config: Any = None

    @model_validator(mode="after")
    def _has_blocks_of_its_role(self) -> MessageParam:
        if isinstance(self.content, list):
            check_role(self.role, self.content)
        return self

    @property
    def blocks(self) -> list[Any]:
        """The content as blocks (`Block`)."""
        return [TextBlock(type="text", text=self.content)] if isinstance(self.content, str) else self.content


class ThinkingOn(LenientModel):
    """Reason before the answer.

    Attributes:
      budget_tokens: A target for Anthropic's models, required with "enabled". Without effect here, where only
        `max_tokens` bounds what is generated; named as ignored.
      display: Without effect: reasoning is sent as the model writes it.
    """

    not_applied: ClassVar[Mapping[str, NotApplied]] = {"budget_tokens": NotApplied()}

    type: Literal["enabled"]
    budget_tokens: int = Field(ge=MIN_THINKING_BUDGET, le=MAX_INT32)
    display: Any = None


class ThinkingOff(LenientModel):
    """Answer at once."""

    type: Literal["disabled"]


class ThinkingAdaptive(LenientModel):
    """Reason as the chat template has it by default."""

    type: Literal["adaptive"]
    display: Any = None


_THINKING = {"enabled": "ThinkingOn", "disabled": "ThinkingOff", "adaptive": "ThinkingAdaptive"}
Thinking = Annotated[
    Annotated[ThinkingOn, Tag("ThinkingOn")]
    | Annotated[ThinkingOff, Tag("ThinkingOff")]
    | Annotated[ThinkingAdaptive, Tag("ThinkingAdaptive")],
    Discriminator(
        tag_by_type(_THINKING),
        custom_error_type="unknown_thinking",
        custom_error_message="type must be enabled, disabled or adaptive",
    ),
]


class SchemaFormat(StrictModel):
    """JSON that follows a schema; `name` and `strict` have no effect."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")
    name: str | None = None
    strict: bool | None = None


class OutputConfig(LenientModel):
    """How to answer.

    Attributes:
      effort: How much to reason, where the chat template reads it.
      format: What the answer's text must match.
    """

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: SchemaFormat | None = None


class CountTokensRequest(LenientModel):
    """A conversation, of which the prompt's tokens are counted.

    Attributes:
      model: A served name.
      messages: The turns. If the last is the assistant's, the answer goes on with it.
      system: What comes before them.
      tools, tool_choice: Functions, and whether to call one.
      thinking: Whether to reason.
      output_config: How much to reason, and what the answer's text must match.
      output_format: The older name of `output_config.format`.
      mcp_servers: Must be empty: tools run at the client.
      cache_control, metadata, context_management, service_tier, container, inference_geo, speed, safeguards,
        diagnostics: Accepted without effect.
    """

    not_applied: ClassVar[Mapping[str, NotApplied]] = {
        "mcp_servers": NotApplied(([],), "tools run at the client here: leave it out"),
        "container": NotApplied(),
        "speed": NotApplied(("standard",)),
        "n": NotApplied((1,), "there is one answer: leave it out"),
        "stop": NotApplied(([],), "send stop_sequences"),
        "seed": NotApplied((), "send it to /v1/chat/completions"),
        "response_format": NotApplied((), "send output_config.format"),
        "logprobs": NotApplied((False,), "send it to /v1/chat/completions"),
    }

    model: Annotated[str, Field(min_length=1)]
    messages: list[MessageParam] = Field(min_length=1, max_length=MAX_MESSAGES)
    system: str | list[TextBlock] | None = None
    tools: list[ToolDefinition] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: SchemaFormat | None = None
    mcp_servers: list[Any] | None = None
    cache_control: Any = None
    metadata: dict[str, Any] | None = None
    context_management: Any = None
    service_tier: Any = None
    container: Any = None
    inference_geo: Any = None
    speed: Any = None
    safeguards: Any = None
    diagnostics: Any = None


class MessagesRequest(CountTokensRequest):
    """A conversation to answer.

    Attributes:
      max_tokens: Most tokens to generate; 0 reads the prompt into the cache and answers nothing.
      stop_sequences: Strings that end the answer.
      temperature, top_p, top_k: None leaves the model's default.
      stream: Stream the answer.
    """

    max_tokens: int = Field(ge=0, le=MAX_INT32)
    stop_sequences: list[str] | None = None
    temperature: float | None = bounded(NUMBER_BOUNDS["temperature"], high=2)
    top_p: float | None = bounded(NUMBER_BOUNDS["top_p"])
    top_k: int | None = bounded(INTEGER_BOUNDS["top_k"], high=MAX_INT32)
    stream: bool | None = None
