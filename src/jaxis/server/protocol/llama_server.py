"""llama-server's own /completion."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, Field

from jaxis.sampling_params import INTEGER_BOUNDS, NUMBER_BOUNDS
from jaxis.server.protocol.base import MAX_INT32, LenientModel, Stop, TokenId, bounded, is_none
from jaxis.server.protocol.not_applied import OTHER_SERVERS_FIELDS, NotApplied

# llama-server's fields that change answers and are not applied here.
_NOT_APPLIED = (
    *("typical_p", "top_n_sigma", "mirostat", "dynatemp_range", "dry_multiplier", "xtc_probability", "samplers"),
    "lora_request",
)
_ASK_OPENAIS = "ask /v1/completions"


class LlamaCompletionRequest(LenientModel):
    """A prompt to continue.

    Attributes:
      prompt: A string, or token ids.
      n_predict: Most tokens to generate; none or -1 goes on until the model stops or its context is full.
      seed: A negative one is the server's own, as if it were left out.
      repeat_penalty: jaxis's `repetition_penalty`.
      grammar: In GBNF, or in Lark's syntax.
      json_schema: What the answer follows.
    """

    not_applied: ClassVar[Mapping[str, NotApplied]] = {
        **{name: OTHER_SERVERS_FIELDS[name] for name in _NOT_APPLIED},
        "n_probs": NotApplied((0,), _ASK_OPENAIS),
        "logit_bias": NotApplied(([], {}), _ASK_OPENAIS),
        "cache_prompt": NotApplied((True,)),  # prefixes are always cached
        "id_slot": NotApplied((-1,)),  # places are not numbered
    }

    model: str | None = None
    prompt: str | Annotated[list[TokenId], Field(min_length=1)]
    stream: bool | None = None
    n_predict: Annotated[int, Field(ge=-1, le=MAX_INT32)] | None = None
    temperature: float | None = bounded(NUMBER_BOUNDS["temperature"])
    top_k: Annotated[int, Field(le=MAX_INT32)] | None = None
    top_p: float | None = bounded(NUMBER_BOUNDS["top_p"])
    min_p: float | None = bounded(NUMBER_BOUNDS["min_p"])
    seed: Annotated[int, Field(le=INTEGER_BOUNDS["seed"].high)] | None = None
    stop: Stop | None = None
    repeat_penalty: float | None = bounded(NUMBER_BOUNDS["repetition_penalty"])
    presence_penalty: float | None = bounded(NUMBER_BOUNDS["presence_penalty"])
    frequency_penalty: float | None = bounded(NUMBER_BOUNDS["frequency_penalty"])
    ignore_eos: bool | None = None
    grammar: str | None = None
    json_schema: dict[str, Any] | None = None


class LlamaTimings(BaseModel):
    """Tokens and milliseconds of an answer's phases; `prompt_n` leaves out the `cache_n` tokens of the prefix cache."""

    cache_n: int
    prompt_n: int
    prompt_ms: float
    predicted_n: int
    predicted_ms: float
    predicted_per_second: float | None


class LlamaCompletion(BaseModel):
    """A whole answer, an event of a stream, or its last event, which alone has those fields that others leave out.

    Attributes:
      content: The text, or what is new of it.
      tokens: Its token ids.
      stop: Whether the answer has ended.
      stop_type: Why: "eos", "limit" or "word".
      stopping_word: The stop string that ended it; "" if none did.
      tokens_predicted, tokens_evaluated: Generated tokens so far, and those of the prompt.
      tokens_cached: Those of the prompt that the prefix cache held.
      truncated: Prompts are never cut.
    """

    index: Literal[0] = 0
    content: str
    tokens: list[int]
    stop: bool
    tokens_predicted: int
    tokens_evaluated: int
    model: str | None = Field(default=None, exclude_if=is_none)
    stop_type: str | None = Field(default=None, exclude_if=is_none)
    stopping_word: str | None = Field(default=None, exclude_if=is_none)
    tokens_cached: int | None = Field(default=None, exclude_if=is_none)
    truncated: Literal[False] | None = Field(default=None, exclude_if=is_none)
    timings: LlamaTimings | None = Field(default=None, exclude_if=is_none)
