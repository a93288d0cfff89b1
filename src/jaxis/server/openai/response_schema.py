"""Request and answer bodies of /v1/responses."""

from __future__ import annotations

import time
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, Field

from jaxis.sampling_params import INTEGER_BOUNDS, TOP_LOGPROBS_BOUNDS
from jaxis.server.generation.timings import Timings
from jaxis.server.http.body import MAX_INT32, LenientModel, NotApplied, StrictModel, bounded, is_none
from jaxis.server.openai.chat_schema import MAX_MESSAGES
from jaxis.server.openai.fields import (
    EngineRequest,
    JsonObjectFormat,
    PromptTokensDetails,
    ReasoningTokensDetails,
    TextFormat,
)
from jaxis.server.openai.not_applied import (
    ACCOUNT_FIELDS,
    NOT_FOR_RESPONSES,
    OTHER_SERVERS_FIELDS,
    OTHER_THINKING_BUDGET,
)
from jaxis.server.openai.response_items import MAX_ID, InputItem, OutputItem
from jaxis.server.openai.response_tools import AnyTool, NamedTool


class TextSchemaFormat(StrictModel):
    """JSON that follows a schema. The name, the description and `strict` have no effect."""

    type: Literal["json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class TextOptions(LenientModel):
    """Constraint on the answer's text."""

    not_applied: ClassVar[dict[str, NotApplied]] = {"verbosity": NotApplied()}

    format: Annotated[TextFormat | JsonObjectFormat | TextSchemaFormat, Field(discriminator="type")] | None = None


class ReasoningOptions(LenientModel):
    """Reasoning effort, as a variable of the chat template if it reads one. Summaries are not made."""

    not_applied: ClassVar[dict[str, NotApplied]] = {
        "summary": NotApplied(neutral=("none",)),
        "generate_summary": NotApplied(neutral=("none",)),
        "max_tokens": OTHER_THINKING_BUDGET,
    }

    effort: Annotated[str, Field(min_length=1, max_length=64)] | None = None
    summary: str | None = None


def _no_hosted_tool(choice: object) -> object:
    kind = choice.get("type") if isinstance(choice, dict) else None
    if isinstance(kind, str) and kind not in ("function", "custom"):
        raise ValueError(f"{kind[:64]!r} cannot be chosen: this server calls functions and custom tools only")
    return choice


_LOGPROBS = "message.output_text.logprobs"
INCLUDED = (_LOGPROBS, "reasoning.encrypted_content")  # reasoning is always sent, unencrypted, and can be sent back


class ResponseRequest(EngineRequest):
    """A string or a conversation to answer.

    Attributes:
      input: Text of a user, or turns.
      instructions: System message before the input.
      metadata: Strings that the answer repeats.
      tools, tool_choice, parallel_tool_calls: Functions, and the choice between them, as in a chat request.
      include: Additional content of the answer; only log-probabilities have an effect.
      top_logprobs: Number of most likely tokens with a log-probability at each position; needs log-probabilities.
      truncation: Accepted without effect; a prompt that is too long is always refused.
      store: False does not store the response for later requests; None and True do.
      previous_response_id: Id of the response that this one continues.
      user, safety_identifier, prompt_cache_key, service_tier: Accepted without effect.
    """

    # Rules for this protocol's own fields, and for other servers' fields, some of which have the same names as its own.
    not_applied: ClassVar[dict[str, NotApplied]] = {
        **{name: rule for name, rule in ACCOUNT_FIELDS.items() if name not in ("metadata", "store")},
        **{n: rule for n, rule in OTHER_SERVERS_FIELDS.items() if n not in ("reasoning", "max_output_tokens")},
        **NOT_FOR_RESPONSES,
        "stream_options": NotApplied(),
        "max_tool_calls": NotApplied(),
        "client_metadata": NotApplied(),
        "context_management": NotApplied(),
        "truncation": NotApplied(neutral=("disabled",)),
        "background": NotApplied(neutral=(False,), advice="there are no background responses here: stream it"),
        "prompt": NotApplied(advice="no prompts are kept here: send instructions and input"),
        "conversation": NotApplied(advice="no conversations are kept here: send previous_response_id"),
    }

    input: (
        Annotated[str, Field(min_length=1)]
        | Annotated[list[InputItem], Field(min_length=1, max_length=MAX_MESSAGES - 1)]
    )
    instructions: str | None = None
    max_output_tokens: int | None = bounded(INTEGER_BOUNDS["max_tokens"], high=MAX_INT32)
    text: TextOptions | None = None
    tools: list[AnyTool] | None = None
    tool_choice: Annotated[Literal["none", "auto", "required"] | NamedTool | None, BeforeValidator(_no_hosted_tool)] = (
        None
    )
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningOptions | None = None
    include: list[str] | None = None
    top_logprobs: int | None = bounded(TOP_LOGPROBS_BOUNDS)
    chat_template_kwargs: dict[str, Any] | None = None
    n: Literal[1] | None = None
    prompt_logprobs: None = None
    return_routed_experts: Literal[False] | None = None
    routed_experts_prompt_start: None = None
    metadata: dict[str, str] | None = Field(None, max_length=16)
    truncation: Literal["auto", "disabled"] | None = None
    store: bool | None = None
    previous_response_id: Annotated[str, Field(min_length=1, max_length=MAX_ID)] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    service_tier: str | None = None

    @property
    def wants_logprobs(self) -> bool:
        return _LOGPROBS in (self.include or [])


class ResponseUsage(BaseModel):
    """Token counts, under this endpoint's names."""

    input_tokens: int
    input_tokens_details: PromptTokensDetails
    output_tokens: int
    output_tokens_details: ReasoningTokensDetails
    total_tokens: int


class ResponseError(BaseModel):
    code: str
    message: str


class IncompleteDetails(BaseModel):
    """Reason why an answer was cut off."""

    reason: Literal["max_output_tokens"] = "max_output_tokens"


ResponseStatus = Literal["in_progress", "completed", "incomplete", "failed"]


class ResponseObject(BaseModel):
    """An answer, complete or in progress.

    Attributes:
      prompt_token_ids, token_ids: Token ids of an ended answer, if the request sets `return_token_ids`.
      seed, timings: Fields as in `Answer`.
    """

    id: str
    object: Literal["response"] = "response"
    created_at: int = Field(default_factory=lambda: int(time.time()))
    status: ResponseStatus
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    metadata: dict[str, str] = {}
    model: str
    output: list[OutputItem] = []
    parallel_tool_calls: bool = True
    previous_response_id: str | None = None
    reasoning: ReasoningOptions = ReasoningOptions()
    store: bool = False
    temperature: float
    text: dict[str, Any] = {"format": {"type": "text"}}
    tool_choice: Literal["none", "auto", "required"] | NamedTool = "auto"
    tools: list[AnyTool] = []
    top_logprobs: int | None = None
    top_p: float
    truncation: Literal["disabled"] = "disabled"
    usage: ResponseUsage | None = None
    kv_transfer_params: dict[str, Any] | None = Field(default=None, exclude_if=is_none)
    prompt_token_ids: list[int] | None = Field(default=None, exclude_if=is_none)
    token_ids: list[int] | None = Field(default=None, exclude_if=is_none)
    seed: int | None = Field(default=None, exclude_if=is_none)
    timings: Timings | None = Field(default=None, exclude_if=is_none)
