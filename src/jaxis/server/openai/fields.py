"""Fields that OpenAI's endpoints share: request fields, under OpenAI's names and vLLM's, and answer fields."""

from __future__ import annotations

import time
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, Field

from jaxis.sampling_params import INTEGER_BOUNDS, LOGIT_BIAS_BOUNDS, NUMBER_BOUNDS, LogprobsMode
from jaxis.server.generation.answer_reader import AnswerCounts
from jaxis.server.generation.timings import Timings
from jaxis.server.http.body import MAX_INT32, LenientModel, NotApplied, StrictModel, TokenId, bounded, is_none
from jaxis.server.openai.not_applied import ACCOUNT_FIELDS, OTHER_SERVERS_FIELDS

MAX_ALLOWED_TOKEN_IDS = 2**19  # more than any vocabulary has
MAX_CHOICES = 4096
Choices = Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1, max_length=MAX_CHOICES)]


class StreamOptions(LenientModel):
    """Options of a stream.

    Attributes:
      include_usage: True ends the stream with a chunk that has the token counts and no choices.
      continuous_usage_stats: True puts the token counts so far into every chunk.
      include_obfuscation: Accepted without effect.
    """

    not_applied: ClassVar[dict[str, NotApplied]] = {"include_obfuscation": NotApplied(neutral=(False,))}

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class SamplingFields(LenientModel):
    """Parameters with the same names in SamplingParams. None selects the model's default."""

    n: int | None = bounded(INTEGER_BOUNDS["n"])
    temperature: float | None = bounded(NUMBER_BOUNDS["temperature"])
    top_p: float | None = bounded(NUMBER_BOUNDS["top_p"])
    top_k: int | None = bounded(INTEGER_BOUNDS["top_k"], high=MAX_INT32)
    min_p: float | None = bounded(NUMBER_BOUNDS["min_p"])
    frequency_penalty: float | None = bounded(NUMBER_BOUNDS["frequency_penalty"])
    presence_penalty: float | None = bounded(NUMBER_BOUNDS["presence_penalty"])
    repetition_penalty: float | None = bounded(NUMBER_BOUNDS["repetition_penalty"])
    logit_bias: dict[str, Annotated[float, Field(ge=LOGIT_BIAS_BOUNDS.low, le=LOGIT_BIAS_BOUNDS.high)]] | None = Field(
        None, max_length=1024
    )
    stop: str | list[str] | None = None
    stop_token_ids: list[TokenId] | None = Field(None, max_length=1024)
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    thinking_token_budget: int | None = bounded(INTEGER_BOUNDS["thinking_token_budget"], high=MAX_INT32)
    allowed_token_ids: list[TokenId] | None = Field(None, min_length=1, max_length=MAX_ALLOWED_TOKEN_IDS)
    bad_words: list[Annotated[str, Field(min_length=1)]] | None = Field(None, max_length=128)
    seed: int | None = bounded(INTEGER_BOUNDS["seed"])
    min_tokens: int | None = bounded(INTEGER_BOUNDS["min_tokens"], high=MAX_INT32)
    include_stop_str_in_output: bool | None = None
    prompt_logprobs: int | None = bounded(INTEGER_BOUNDS["prompt_logprobs"])
    logprobs_mode: LogprobsMode | None = None
    return_routed_experts: bool | None = None
    routed_experts_prompt_start: int | None = bounded(INTEGER_BOUNDS["routed_experts_prompt_start"], high=MAX_INT32)
    thinking_budget_grace_period: int | None = bounded(INTEGER_BOUNDS["thinking_budget_grace_period"], high=MAX_INT32)


class EngineRequest(SamplingFields):
    """Fields of every request that generates.

    Attributes:
      model: Served name; None for the server's only model.
      priority: Priority of the request; lower values are served first, and None is 0.
      cache_salt: Salt of the prefix cache; only requests with the same salt share blocks.
      kv_transfer_params: Parameters of vLLM that keep the prompt's blocks for another server, or say where to find
        them. They change no answer.
      return_token_ids: True returns the ids of the prompt and of the generated tokens, as in vLLM.
    """

    model: str | None = None
    stream: bool | None = None
    priority: int | None = Field(None, ge=-(2**31), le=2**31 - 1)
    cache_salt: str | None = Field(None, min_length=1, max_length=1024)
    kv_transfer_params: dict[str, Any] | None = None
    return_token_ids: bool | None = None


class GenerationRequest(EngineRequest):
    """Fields that chat and text completions accept.

    Attributes:
      stream_options: Options of the stream; needs `stream`.
      user, metadata, safety_identifier, prompt_cache_key, service_tier, store: Fields for OpenAI's accounts and
        records, accepted without effect.
    """

    not_applied: ClassVar[dict[str, NotApplied]] = ACCOUNT_FIELDS | OTHER_SERVERS_FIELDS

    stream_options: StreamOptions | None = None
    return_tokens_as_token_ids: bool | None = None

    user: str | None = None
    metadata: dict[str, Any] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    service_tier: str | None = None
    store: bool | None = None


class TextFormat(StrictModel):
    type: Literal["text"]


class JsonObjectFormat(StrictModel):
    """A JSON object.

    Attributes:
      schema_: Schema of the object, as in llama.cpp; None for any object.
    """

    type: Literal["json_object"]
    schema_: dict[str, Any] | None = Field(None, alias="schema")


class JsonSchema(StrictModel):
    """A schema with its name.

    Attributes:
      name, description: Accepted without effect; the model does not see them.
      schema_: Schema of the answer; None for any JSON object.
      strict: Accepted without effect; answers always follow the schema.
    """

    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class JsonSchemaFormat(StrictModel):
    """JSON that follows a schema."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]


class StructuredOutputsParams(StrictModel):
    """vLLM's constraint; exactly one of the fields."""

    json_: dict[str, Any] | str | None = Field(None, alias="json")
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None
    json_object: Literal[True] | None = None


class StructuredFields(LenientModel):
    """Constraints that both completion endpoints accept; at most one of the fields.

    Attributes:
      guided_json, guided_regex, guided_choice, guided_grammar: Older names of vLLM's constraints.
    """

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputsParams | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None


class RefusalPart(LenientModel):
    """A refusal, which some servers send instead of text."""

    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        return self.refusal


class FunctionDefinition(LenientModel):
    """A function.

    Attributes:
      name: Name of at most 128 letters, digits, `_`, `-` and `.`.
      parameters: JSON schema of an object with the arguments; None for a function without arguments.
      strict: True if calls follow the schema even when the model is free to call; with tool_choice "required" or a
        named function they always do.
    """

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(LenientModel):
    """A tool; only functions are supported."""

    type: Literal["function"]
    function: FunctionDefinition


class FunctionName(StrictModel):
    """Name of the function to call."""

    name: str


class NamedToolChoice(StrictModel):
    """The one function that must be called."""

    type: Literal["function"]
    function: FunctionName


# A call's arguments as the JSON text of an object. Any text may be sent back, also that of a call that was cut off;
# null stands for an empty object.
ArgumentsText = Annotated[str, BeforeValidator(lambda value: "" if value is None else value)]


class FunctionCall(LenientModel):
    """A function's name, and its arguments."""

    name: str
    arguments: ArgumentsText = ""


class ChatToolCall(LenientModel):
    """A call. Its `index` is left over from streamed calls that clients send back, and is ignored."""

    id: str | None = None
    type: Literal["function"] | None = "function"
    function: FunctionCall
    index: int | None = Field(default=None, exclude_if=is_none)


class FunctionCallDelta(BaseModel):
    """A chunk's addition to a function call: the name in its first chunk, and a part of its arguments."""

    name: str | None = Field(default=None, exclude_if=is_none)
    arguments: str | None = Field(default=None, exclude_if=is_none)


class ChatToolCallDelta(BaseModel):
    """A chunk's addition to the call with this index; the first chunk has its id and name."""

    index: int
    id: str | None = Field(default=None, exclude_if=is_none)
    type: Literal["function"] | None = Field(default=None, exclude_if=is_none)
    function: FunctionCallDelta


class PromptTokensDetails(BaseModel):
    """Number of prompt tokens found in the prefix cache."""

    cached_tokens: int = 0


class ReasoningTokensDetails(BaseModel):
    """Number of generated tokens that are reasoning."""

    reasoning_tokens: int = 0


class CompletionTokensDetails(ReasoningTokensDetails):
    """Numbers of reasoning tokens, and of tokens that the prediction guessed right and wrong."""

    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0


class Usage(BaseModel):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    total_tokens: int = 0
    prompt_tokens_details: PromptTokensDetails = Field(default_factory=PromptTokensDetails)
    completion_tokens_details: CompletionTokensDetails = Field(default_factory=CompletionTokensDetails)

    @classmethod
    def of(cls, counts: AnswerCounts, num_reasoning_tokens: int = 0) -> Usage:
        """Returns the counts of a job's answers so far."""
        num_prompt = counts.num_prompt_tokens
        return cls(
            prompt_tokens=num_prompt,
            completion_tokens=counts.num_tokens,
            total_tokens=num_prompt + counts.num_tokens,
            completion_tokens_details=CompletionTokensDetails(
                reasoning_tokens=num_reasoning_tokens,
                accepted_prediction_tokens=counts.num_accepted_predictions,
                rejected_prediction_tokens=counts.num_rejected_predictions,
            ),
            prompt_tokens_details=PromptTokensDetails(cached_tokens=counts.num_cached_tokens),
        )


class Answer(BaseModel):
    """Fields common to all answers.

    Attributes:
      created: Time of the answer in Unix seconds.
      system_fingerprint: Fingerprint of the weights, the version and the settings. With equal fingerprints, equal
        requests that are greedy or have a seed get equal answers.
      seed: Seed of the request, or the seed drawn for it; in a stream, in the chunk that ends it. With several prompts,
        each choice has its own.
      timings: Times of the answer's phases; in a stream, in the last chunk.
    """

    id: str
    object: str
    created: int = Field(default_factory=lambda: int(time.time()))
    model: str
    system_fingerprint: str | None = None
    seed: int | None = Field(default=None, exclude_if=is_none)
    timings: Timings | None = Field(default=None, exclude_if=is_none)
