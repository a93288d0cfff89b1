"""/v1/responses: text and functions only, and nothing is stored."""

from __future__ import annotations

import time
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from jaxis.sampling_params import INTEGER_BOUNDS
from jaxis.server.protocol.base import (
    MAX_INT32,
    CompletionTokensDetails,
    OnlyFalse,
    PromptTokensDetails,
    SamplingFields,
    StrictModel,
    bounded,
)
from jaxis.server.protocol.chat import MAX_MESSAGES
from jaxis.server.protocol.response_items import InputItem, OutputItem, chat_messages
from jaxis.server.protocol.structured import JsonObjectFormat, TextFormat
from jaxis.server.protocol.tools import FunctionDefinition


class TextSchemaFormat(StrictModel):
    """JSON that follows a schema; name, description and strict are as in `JsonSchema`."""

    type: Literal["json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class TextOptions(StrictModel):
    """What the text must match."""

    format: Annotated[TextFormat | JsonObjectFormat | TextSchemaFormat, Field(discriminator="type")] | None = None


class ReasoningOptions(StrictModel):
    """How much to reason: a variable of the chat template."""

    effort: Annotated[str, Field(min_length=1, max_length=64)] | None = None
    summary: None = None


class ResponseTool(FunctionDefinition):
    """A function that the model may call."""

    type: Literal["function"]


class NamedFunction(StrictModel):
    """The one function that must be called."""

    type: Literal["function"]
    name: str


class ResponseRequest(SamplingFields):
    """A string or a conversation to answer.

    Attributes:
      input: A user's text, or turns.
      instructions: A system message before them.
      max_output_tokens: Most tokens to generate.
      metadata: Comes back with the answer.
      store: Only false has a meaning: nothing is ever stored. OpenAI's clients leave it out.
      text: What the answer must match.
      tools, tool_choice, parallel_tool_calls: As in a chat request.
      reasoning: How much to reason.
      include: Log-probabilities. Reasoning needs no encryption to be sent back: it comes as it is.
      top_logprobs: With log-probabilities: of this many most likely tokens for each token.
      user, safety_identifier, prompt_cache_key, service_tier: Accepted without effect.
    """

    model: str | None = None
    input: (
        Annotated[str, Field(min_length=1)]
        | Annotated[list[InputItem], Field(min_length=1, max_length=MAX_MESSAGES - 1)]
    )
    instructions: str | None = None
    max_output_tokens: int | None = bounded(INTEGER_BOUNDS["max_tokens"], high=MAX_INT32)
    stream: bool | None = None
    text: TextOptions | None = None
    tools: list[ResponseTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedFunction | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningOptions | None = None
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] | None = None
    top_logprobs: int | None = bounded(INTEGER_BOUNDS["logprobs"])
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

    @property
    def wants_logprobs(self) -> bool:
        """Whether log-probabilities are asked for."""
        return "message.output_text.logprobs" in (self.include or [])

    def chat_fields(self) -> dict[str, Any]:
        """The request's fields under the names, and in the shape, of a chat request."""
        is_text = isinstance(self.input, str)
        messages = [{"role": "user", "content": self.input}] if is_text else chat_messages(self.input)
        if self.instructions is not None:
            messages.insert(0, {"role": "system", "content": self.instructions})
        fields: dict[str, Any] = {"messages": messages, "max_completion_tokens": self.max_output_tokens}
        if self.tools is not None:
            functions = [tool.model_dump(exclude={"type"}, exclude_unset=True) for tool in self.tools]
            fields["tools"] = [{"type": "function", "function": function} for function in functions]
        choice = self.tool_choice
        is_named = isinstance(choice, NamedFunction)
        fields["tool_choice"] = {"type": "function", "function": {"name": choice.name}} if is_named else choice
        if self.text is not None and self.text.format is not None:
            response_format = self.text.format.model_dump(by_alias=True, exclude_unset=True)
            if response_format["type"] == "json_schema":
                response_format = {"type": response_format.pop("type"), "json_schema": response_format}
            fields["response_format"] = response_format
        if self.reasoning is not None:
            fields["reasoning_effort"] = self.reasoning.effort
        if self.wants_logprobs:
            fields |= {"logprobs": True, "top_logprobs": self.top_logprobs}
        return fields


class ResponseUsage(BaseModel):
    """Token counts, under this endpoint's names."""

    input_tokens: int
    input_tokens_details: PromptTokensDetails
    output_tokens: int
    output_tokens_details: CompletionTokensDetails
    total_tokens: int


class IncompleteDetails(BaseModel):
    """Why an answer was cut off."""

    reason: Literal["max_output_tokens"] = "max_output_tokens"


class ResponseObject(BaseModel):
    """An answer, complete or in progress."""

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
    output: list[OutputItem] = []
    parallel_tool_calls: bool = True
    previous_response_id: None = None
    reasoning: ReasoningOptions = ReasoningOptions()
    store: Literal[False] = False
    temperature: float
    text: dict[str, Any] = {"format": {"type": "text"}}
    tool_choice: Literal["none", "auto", "required"] | NamedFunction = "auto"
    tools: list[ResponseTool] = []
    top_logprobs: int | None = None
    top_p: float
    truncation: Literal["disabled"] = "disabled"
    usage: ResponseUsage | None = None
