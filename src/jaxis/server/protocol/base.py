"""Fields shared by all requests."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr

from jaxis.sampling_params import INTEGER_BOUNDS, LOGIT_BIAS_BOUNDS, NUMBER_BOUNDS, Bounds
from jaxis.server.protocol.not_applied import ACCOUNT_FIELDS, OTHER_SERVERS_FIELDS, NotApplied

MAX_INT32 = 2**31 - 1
TokenId = Annotated[int, Field(ge=0, le=MAX_INT32)]
Stop = str | list[str]
MAX_ALLOWED_TOKEN_IDS = 2**19  # more than any vocabulary has


def bounded(bounds: Bounds, *, high: float | None = None) -> Any:
    """A field that is None by default and has a parameter's bounds; `high` where the parameter itself has none."""
    high = bounds.high if high is None else high
    if bounds.excludes_low:
        return Field(None, gt=bounds.low, le=high)
    return Field(None, ge=bounds.low, le=high)


class StrictModel(BaseModel):
    """Refuses unknown fields and converts nothing: "5" is not a number."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class LenientModel(StrictModel):
    """Checks the fields that it declares, and accepts others: every release of a client may add some.

    `server.endpoints.ignored_fields` names what a request carries in vain, and refuses what would change the answer.

    Attributes:
      not_applied: What becomes of fields that are not applied, declared or not; unknown ones that are not in it have
        no effect.
    """

    model_config = ConfigDict(extra="allow")
    not_applied: ClassVar[dict[str, NotApplied]] = {}
    _unknown_fields: dict[str, Any] = PrivateAttr(default_factory=dict)

    def model_post_init(self, _context: Any) -> None:
        """Pydantic's call: keeps fields that are not declared out of `model_dump`, and so out of prompts."""
        if extra := self.__pydantic_extra__:
            self._unknown_fields = dict(extra)
            extra.clear()

    @property
    def unknown_fields(self) -> Mapping[str, Any]:
        """The fields of this object, not of those inside it, that it does not declare."""
        # Not as an attribute, which is slow where it is private, and requests have thousands of objects.
        return (self.__pydantic_private__ or {}).get("_unknown_fields", {})


class StreamOptions(LenientModel):
    """How to stream.

    Attributes:
      include_usage: End the stream with a chunk that has the token counts and no choices.
      continuous_usage_stats: Put the token counts so far into every chunk.
      include_obfuscation: Accepted without effect.
    """

    not_applied: ClassVar[dict[str, NotApplied]] = {"include_obfuscation": NotApplied(neutral=(False,))}

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class SamplingFields(LenientModel):
    """Fields that go to SamplingParams under the same names; None leaves the model's default."""

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
    allowed_token_ids: list[TokenId] | None = Field(None, min_length=1, max_length=MAX_ALLOWED_TOKEN_IDS)
    bad_words: list[Annotated[str, Field(min_length=1)]] | None = Field(None, max_length=128)
    seed: int | None = bounded(INTEGER_BOUNDS["seed"])
    min_tokens: int | None = bounded(INTEGER_BOUNDS["min_tokens"], high=MAX_INT32)
    stop: Stop | None = None
    stop_token_ids: list[TokenId] | None = Field(None, max_length=1024)
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: int | None = bounded(INTEGER_BOUNDS["prompt_logprobs"])


class GenerationRequest(SamplingFields):
    """Fields that both completion endpoints accept.

    Attributes:
      model: A served name; None is the one model there is.
      stream: Stream the answer.
      stream_options: Only with `stream`.
      priority: The lower value is served first; None is 0.
      cache_salt: Only requests with the same salt share cached prefixes.
      kv_transfer_params: vLLM's: keep the prompt's blocks for another server, or where to find them; changes no answer.
      user, metadata, safety_identifier, prompt_cache_key, service_tier, store: OpenAI's, for its own accounts and
        records; accepted without effect here.
    """

    not_applied: ClassVar[dict[str, NotApplied]] = ACCOUNT_FIELDS | OTHER_SERVERS_FIELDS

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: int | None = Field(None, ge=-(2**31), le=2**31 - 1)
    cache_salt: str | None = Field(None, min_length=1, max_length=1024)
    return_tokens_as_token_ids: bool | None = None
    kv_transfer_params: dict[str, Any] | None = None

    user: str | None = None
    metadata: dict[str, Any] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    service_tier: str | None = None
    store: bool | None = None


class PromptTokensDetails(BaseModel):
    """How many prompt tokens came from the prefix cache."""

    cached_tokens: int = 0


class ReasoningTokensDetails(BaseModel):
    """How many generated tokens are reasoning."""

    reasoning_tokens: int = 0


class CompletionTokensDetails(ReasoningTokensDetails):
    """Also how many tokens were guessed from the prediction, right and wrong."""

    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0


class Usage(BaseModel):
    """Token counts of an answer."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    total_tokens: int = 0
    prompt_tokens_details: PromptTokensDetails = Field(default_factory=PromptTokensDetails)
    completion_tokens_details: CompletionTokensDetails = Field(default_factory=CompletionTokensDetails)


class Answer(BaseModel):
    """Fields common to all answers.

    Attributes:
      created: Unix seconds.
      system_fingerprint: Names the weights, the version and the settings: under equal ones, equal requests that are
        greedy or have a seed get equal answers.
    """

    id: str
    object: str
    created: int = Field(default_factory=lambda: int(time.time()))
    model: str
    system_fingerprint: str | None = None


def new_id(kind: str) -> str:
    """A unique id, such as "chatcmpl-..."."""
    return f"{kind}-{uuid.uuid4().hex}"


def is_none(value: object) -> bool:
    """For fields that are left out of an answer when they hold nothing."""
    return value is None
