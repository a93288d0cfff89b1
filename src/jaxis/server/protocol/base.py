"""What all requests share."""

from __future__ import annotations

import time
import uuid
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from jaxis.sampling_params import MAX_LOGPROBS, MAX_N, REPETITION_PENALTY_BOUNDS

TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]
Stop = str | list[str]
MAX_ALLOWED_TOKEN_IDS = 2**19  # more than any vocabulary has


def _exactly_false(value: object) -> object:
    if value is not False:
        raise ValueError("only false is supported")
    return value


# A plain Literal[False] takes 0 and 0.0 too.
OnlyFalse = Annotated[Literal[False], BeforeValidator(_exactly_false)]


class StrictModel(BaseModel):
    """Takes nothing that it does not know, and converts nothing: "5" is no number."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class StreamOptions(StrictModel):
    """How to stream.

    Attributes:
      include_usage: End the stream with a chunk that has the token counts and no choices.
      continuous_usage_stats: Put the token counts so far into every chunk.
    """

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: OnlyFalse | None = None


class SamplingFields(StrictModel):
    """Fields that go to SamplingParams under the same names; None leaves the model's default."""

    n: int | None = Field(None, ge=1, le=MAX_N)
    temperature: float | None = Field(None, ge=0)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=2**31 - 1)
    min_p: float | None = Field(None, ge=0, le=1)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, ge=REPETITION_PENALTY_BOUNDS[0], le=REPETITION_PENALTY_BOUNDS[1])
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = Field(None, max_length=1024)
    allowed_token_ids: list[TokenId] | None = Field(None, min_length=1, max_length=MAX_ALLOWED_TOKEN_IDS)
    bad_words: list[Annotated[str, Field(min_length=1)]] | None = Field(None, max_length=128)
    seed: int | None = Field(None, ge=-(2**63), le=2**64 - 1)
    min_tokens: int | None = Field(None, ge=0, le=2**31 - 1)
    stop: Stop | None = None
    stop_token_ids: list[TokenId] | None = Field(None, max_length=1024)
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)


class GenerationRequest(SamplingFields):
    """What both completion endpoints take.

    Attributes:
      model: A served name; None is the one model there is.
      stream: Send the answer as it comes.
      stream_options: Only with `stream`.
      priority: The lower value is served first.
      cache_salt: Only requests with the same salt share cached prefixes.
      user, metadata, safety_identifier, prompt_cache_key, service_tier, store: OpenAI's, for its own accounts and
        records; taken, and without effect here.
    """

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: int = Field(0, ge=-(2**31), le=2**31 - 1)
    cache_salt: str | None = Field(None, min_length=1, max_length=1024)
    return_tokens_as_token_ids: bool | None = None

    user: str | None = None
    metadata: dict[str, Any] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    service_tier: Literal["auto", "default"] | None = None
    store: OnlyFalse | None = None


class PromptTokensDetails(BaseModel):
    """Of a prompt's tokens, those that the prefix cache held."""

    cached_tokens: int = 0


class CompletionTokensDetails(BaseModel):
    """Of the generated tokens, those of reasoning."""

    reasoning_tokens: int = 0


class Usage(BaseModel):
    """Token counts of an answer."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    total_tokens: int = 0
    prompt_tokens_details: PromptTokensDetails = Field(default_factory=PromptTokensDetails)
    completion_tokens_details: CompletionTokensDetails = Field(default_factory=CompletionTokensDetails)


class Answer(BaseModel):
    """What every answer begins with.

    Attributes:
      created: Unix seconds.
    """

    id: str
    object: str
    created: int = Field(default_factory=lambda: int(time.time()))
    model: str


def new_id(kind: str) -> str:
    """A name that nobody else has, such as "chatcmpl-..."."""
    return f"{kind}-{uuid.uuid4().hex}"


def is_none(value: object) -> bool:
    """For fields that are left out of an answer when they hold nothing."""
    return value is None
