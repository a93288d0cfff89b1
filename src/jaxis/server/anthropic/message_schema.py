"""Request and answer bodies of /v1/messages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, Field, model_validator

from jaxis.sampling_params import INTEGER_BOUNDS, NUMBER_BOUNDS
from jaxis.server.anthropic.message_blocks import Block, TextBlock, ToolDefinition, check_role
from jaxis.server.http.body import MAX_INT32, LenientModel, NotApplied, StrictModel, bounded

MAX_MESSAGES = 4096
MIN_THINKING_BUDGET = 1024
StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class MessageParam(LenientModel):
    """One turn.

    Attributes:
      role: Role of the turn; "system" may be anywhere in the conversation.
      content: Blocks; a string stands for one text block.
      clear_at: End of a system message's effect; "next_user_message" shows it only until the user's next message.
      output_config: Accepted in system messages of Claude Code without effect; the request's own is used.
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
        return [TextBlock(type="text", text=self.content)] if isinstance(self.content, str) else self.content


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


ToolChoice = Annotated[AutoChoice | AnyChoice | NamedChoice | NoChoice, Field(discriminator="type")]


class ThinkingOn(LenientModel):
    """Reasoning before the answer.

    Attributes:
      budget_tokens: Most thinking tokens, if the model's marks of thinking are known; reported as ignored otherwise.
      display: Without effect; reasoning is sent as the model writes it.
    """

    type: Literal["enabled"]
    budget_tokens: int = Field(ge=MIN_THINKING_BUDGET, le=MAX_INT32)
    display: Any = None


class ThinkingOff(LenientModel):
    """An answer without reasoning."""

    type: Literal["disabled"]


class ThinkingAdaptive(LenientModel):
    """Reasoning as the chat template does by default."""

    type: Literal["adaptive"]
    display: Any = None


Thinking = Annotated[ThinkingOn | ThinkingOff | ThinkingAdaptive, Field(discriminator="type")]


class SchemaFormat(StrictModel):
    """JSON that follows a schema; `name` and `strict` have no effect."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")
    name: str | None = None
    strict: bool | None = None


class OutputConfig(LenientModel):
    """Settings of the output.

    Attributes:
      effort: Reasoning effort, if the chat template reads one.
    """

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: SchemaFormat | None = None


class CountTokensRequest(LenientModel):
    """A conversation whose prompt's tokens are counted.

    Attributes:
      messages: Turns. If the last one is the assistant's, the answer continues it.
      system: Text before the turns.
      tools, tool_choice: Functions, and the choice between them.
      thinking: Switch of reasoning.
      output_config: Reasoning effort, and constraint on the answer's text.
      output_format: Older name of `output_config.format`.
      mcp_servers: Servers of tools; must be empty, since tools run at the client.
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
      max_tokens: Most tokens to generate; 0 reads the prompt into the cache and generates no answer.
      temperature, top_p, top_k: Sampling parameters; None selects the model's default.
    """

    max_tokens: int = Field(ge=0, le=MAX_INT32)
    stop_sequences: list[str] | None = None
    temperature: float | None = bounded(NUMBER_BOUNDS["temperature"], high=2)
    top_p: float | None = bounded(NUMBER_BOUNDS["top_p"])
    top_k: int | None = bounded(INTEGER_BOUNDS["top_k"], high=MAX_INT32)
    stream: bool | None = None


class AnswerText(BaseModel):
    type: Literal["text"] = "text"
    text: str


class AnswerThinking(BaseModel):
    """Reasoning. The signature has no meaning, and is not checked when it is sent back."""

    type: Literal["thinking"] = "thinking"
    thinking: str
    signature: str


class AnswerToolUse(BaseModel):
    """A call. If the answer was cut off, its last call has only the complete arguments."""

    type: Literal["tool_use"] = "tool_use"
    id: str
    name: str
    input: dict[str, Any]


class OutputTokensDetails(BaseModel):
    """Number of reasoning tokens among the generated ones."""

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
      stop_reason: Reason of the end; None in the first event of a stream.
      stop_sequence: Member of `stop_sequences` that ended the answer.
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
    """Number of tokens of a prompt."""

    input_tokens: int


class MessageErrorObject(BaseModel):
    """Type and message of an error."""

    type: str
    message: str


class MessageErrorResponse(BaseModel):
    """Anthropic's form of an error; the id is that of the `request-id` header."""

    type: Literal["error"] = "error"
    error: MessageErrorObject
    request_id: str | None
