"""Parameters of sampling and stopping, under vLLM's names."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal

from jaxis.errors import RequestError
from jaxis.kv_transfer_params import KVTransferParams
from jaxis.structured_outputs import StructuredOutputs

MAX_LOGPROBS = 20
ALL_LOGPROBS = -1
LogprobsMode = Literal["raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits"]
RAW_LOGPROBS: LogprobsMode = "raw_logprobs"
LOGPROBS_MODES: tuple[LogprobsMode, ...] = (RAW_LOGPROBS, "raw_logits", "processed_logprobs", "processed_logits")
# A temperature below this is greedy, as in vLLM: logits divided by it would only overflow.
MIN_TEMPERATURE = 1e-5


@dataclass(frozen=True)
class Bounds:
    """The range of a numeric parameter.

    Attributes:
      low, high: Inclusive limits; None is unbounded.
    """

    low: float
    high: float | None = None

    def __contains__(self, value: float) -> bool:
        return value >= self.low and (self.high is None or value <= self.high)

    def __str__(self) -> str:
        return f"at least {self.low}" if self.high is None else f"from {self.low} to {self.high}"


# What SamplingParams, the server's requests and the command line accept.
INTEGER_BOUNDS = {
    "n": Bounds(1, 128),
    "max_tokens": Bounds(1),
    "min_tokens": Bounds(0),
    "top_k": Bounds(-1),
    "seed": Bounds(-(2**63), 2**64 - 1),
    "logprobs": Bounds(ALL_LOGPROBS, MAX_LOGPROBS),
    "prompt_logprobs": Bounds(0, MAX_LOGPROBS),
    "num_speculative_tokens": Bounds(0),
    "thinking_token_budget": Bounds(-1),
    "thinking_budget_grace_period": Bounds(0),
    "routed_experts_prompt_start": Bounds(0),
}
_OPTIONAL_INTEGERS = {
    "max_tokens",
    "seed",
    "logprobs",
    "prompt_logprobs",
    "num_speculative_tokens",
    "thinking_token_budget",
}
NUMBER_BOUNDS = {
    "temperature": Bounds(0),
    "top_p": Bounds(0, 1),
    "min_p": Bounds(0, 1),
    "frequency_penalty": Bounds(-2, 2),
    "presence_penalty": Bounds(-2, 2),
    # Beyond these a float32 logit may become infinite, or 0 times infinity.
    "repetition_penalty": Bounds(0.01, 100),
}
# Parameters that depend on what was generated, with the values that do not.
_OF_OUTPUTS = {
    "repetition_penalty": 1.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "bad_words": [],
    "min_tokens": 0,
    "structured_outputs": None,
    "thinking_token_budget": None,
}
# Of servers' requests: a whole vocabulary is too much for an answer.
TOP_LOGPROBS_BOUNDS = Bounds(0, MAX_LOGPROBS)
LOGIT_BIAS_BOUNDS = Bounds(-100, 100)


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Parameters of a request's sampling and stopping.

    Attributes:
      n: Completions to return for the prompt, each sampled independently.
      temperature: Logits are divided by it before the filters below; 0, or less than MIN_TEMPERATURE, is greedy.
      top_k: Keep the k most likely tokens; 0 or -1 keeps all.
      top_p: Keep the smallest set of most likely tokens whose probability reaches this; 1 keeps all, 0 is greedy.
      min_p: Drop tokens less likely than this share of the most likely one; 0 keeps all.
      frequency_penalty: Subtracted from a token's logit once for every time it was generated; -2 to 2.
      presence_penalty: Subtracted from a token's logit if it was generated at all; -2 to 2.
      repetition_penalty: Divides (or, if negative, multiplies) the logit of each token that stands in the prompt or was
        generated; 1 does nothing.
      logit_bias: Added to the logits of these token ids, before everything else.
      allowed_token_ids: Only these ids can be sampled.
      bad_words: Strings that must not be generated.
      seed: Makes the request's sampling reproducible, whatever else is in the batch.
      max_tokens: Most tokens to generate; None generates until the context is full.
      min_tokens: Tokens to generate before an end-of-sequence or stop token can be sampled; stop strings are looked for
        in what follows them.
      stop: Strings that end the completion.
      stop_token_ids: Token ids that end the completion.
      ignore_eos: Go on after the model's end-of-sequence token.
      include_stop_str_in_output: Leave the stop string (or stop token's text) at the end of the output text.
      logprobs: Also return this many most likely tokens' log-probabilities for each generated token (0: only the
        sampled one's; -1: those of the whole vocabulary), as `logprobs_mode` has them; None returns none.
      prompt_logprobs: The same number for each prompt token, except -1.
      logprobs_mode: Kind of log-probability: "raw_logprobs", of the distribution before any parameter here changed it;
        "processed_logprobs", of the one that is sampled from, after all of them; or the logits of either, "raw_logits"
        and "processed_logits". None is the engine's.
      return_routed_experts: For a mixture of experts, also return the experts of each token, of the prompt and of the
        output, as `CompletionOutput.routed_experts`; None is the engine's.
      routed_experts_prompt_start: Number of the prompt's first tokens that are left out of the routed experts.
      detokenize: Turn the tokens into text.
      skip_special_tokens: Leave special tokens out of the text.
      structured_outputs: Constraint on the completion; None allows any text.
      thinking_token_budget: Number of tokens that the model may think, counted from the mark that opens its thinking,
        in the answer or at the end of the prompt; then its own end of thinking is forced, at once if 0. -1 is None: no
        budget.
      thinking_budget_grace_period: Number of further tokens that the model may think before its end of thinking is
        forced; within them that end is taken as soon as it is among the likely tokens.
      num_speculative_tokens: Maximum number of tokens to guess ahead in a step, where the engine speculates (0: none);
        None is the engine's. Changes no answer.
      prediction: Expected content of the completion, as a string or token ids; guesses are taken from it, where the
        engine speculates by lookup. Changes no answer.
      extra_args: vLLM's argument; only {"kv_transfer_params": {...}}, where the engine has a `kv_transfer_config`.
        Changes no answer.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] = field(default_factory=list)
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: list[str] = field(default_factory=list)
    stop_token_ids: list[int] = field(default_factory=list)
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprobs_mode: LogprobsMode | None = None
    return_routed_experts: bool | None = None
    routed_experts_prompt_start: int = 0
    detokenize: bool = True
    skip_special_tokens: bool = True
    structured_outputs: StructuredOutputs | None = None
    thinking_token_budget: int | None = None
    thinking_budget_grace_period: int = 0
    num_speculative_tokens: int | None = None
    prediction: str | list[int] | None = None
    extra_args: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        for name in ("stop", "bad_words", "stop_token_ids"):
            value = getattr(self, name)
            if isinstance(value, str):
                value = [value]
            object.__setattr__(self, name, list(value or []))
        for name in INTEGER_BOUNDS:
            self._check_integer(name)
        if self.thinking_token_budget == -1:
            object.__setattr__(self, "thinking_token_budget", None)
        for name in NUMBER_BOUNDS:
            self._check_number(name)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(f"={self.min_tokens} must not exceed max_tokens={self.max_tokens}", param="min_tokens")
        if self.logprobs_mode is not None:
            check_logprobs_mode(self.logprobs_mode)
        self._check_texts()
        self._check_structured_outputs()
        self._check_token_ids("stop_token_ids", self.stop_token_ids)
        if self.allowed_token_ids is not None:
            if not self.allowed_token_ids:
                raise RequestError(
                    "must name at least one token id, or be None to allow all", param="allowed_token_ids"
                )
            self._check_token_ids("allowed_token_ids", self.allowed_token_ids)
        self._check_logit_bias()
        self._check_prediction()
        self._check_extra_args()

    @property
    def greedy(self) -> bool:
        """True if the most likely token is always taken."""
        return self.temperature < MIN_TEMPERATURE or self.top_p == 0

    @property
    def computes_whole_prompt(self) -> bool:
        """True if each token of the prompt must be computed, even if it is cached."""
        return self.prompt_logprobs is not None or bool(self.return_routed_experts)

    @property
    def kv_transfer(self) -> KVTransferParams | None:
        """The other server that computes the prompt, or that gets its blocks; None if there is no such server."""
        given = (self.extra_args or {}).get("kv_transfer_params")
        return KVTransferParams.of(given) if given else None

    @property
    def has_penalties(self) -> bool:
        """True if logits depend on the tokens seen so far."""
        return self.frequency_penalty != 0.0 or self.presence_penalty != 0.0 or self.repetition_penalty != 1.0

    def check_scores(self) -> None:
        """Checks that a prompt can be scored as if it were sampled.

        Raises:
          RequestError: `prompt_logprobs` should be those after all parameters, but some parameters depend on the
            output, which a prompt does not have.
        """
        if self.prompt_logprobs is None or not (self.logprobs_mode or RAW_LOGPROBS).startswith("processed"):
            return
        for name, default in _OF_OUTPUTS.items():
            if getattr(self, name) != default:
                raise RequestError(
                    f"depends on what was generated, of which prompt_logprobs in the mode {self.logprobs_mode} know "
                    "nothing: leave it out, or send a raw mode",
                    param=name,
                )

    def _check_integer(self, name: str) -> None:
        value = getattr(self, name)
        if value is None and name in _OPTIONAL_INTEGERS:
            return
        if isinstance(value, bool) or not isinstance(value, int):
            raise RequestError(f"={value!r} must be an integer", param=name)
        if value not in (bounds := INTEGER_BOUNDS[name]):
            raise RequestError(f"={value} must be {bounds}", param=name)

    def _check_number(self, name: str) -> None:
        value = getattr(self, name)
        if not _is_number(value) or not math.isfinite(value):
            raise RequestError(f"={value!r} must be a finite number", param=name)
        if value not in (bounds := NUMBER_BOUNDS[name]):
            raise RequestError(f"={value} must be {bounds}", param=name)

    def _check_texts(self) -> None:
        for name, texts in (("stop", self.stop), ("bad_words", self.bad_words)):
            if not all(isinstance(text, str) and text for text in texts):
                raise RequestError(f"={texts!r} must hold non-empty strings only", param=name)
        if self.stop and not self.detokenize:
            raise RequestError("needs text to look in: set detokenize=True, or use stop_token_ids", param="stop")

    def _check_logit_bias(self) -> None:
        if self.logit_bias is None:
            return
        self._check_token_ids("logit_bias", list(self.logit_bias))
        for token_id, bias in self.logit_bias.items():
            if not _is_number(bias) or bias not in LOGIT_BIAS_BOUNDS:
                raise RequestError(f"={bias!r} must be a number {LOGIT_BIAS_BOUNDS}", param=f"logit_bias[{token_id}]")

    def _check_structured_outputs(self) -> None:
        if self.structured_outputs is None:
            return
        if not isinstance(self.structured_outputs, StructuredOutputs):
            kind = type(self.structured_outputs).__name__
            raise RequestError(f"must be a StructuredOutputs, not {kind}", param="structured_outputs")
        if self.ignore_eos:
            raise RequestError("says where the text ends: leave ignore_eos out", param="structured_outputs")

    def _check_prediction(self) -> None:
        if self.prediction is None or isinstance(self.prediction, str):
            return
        if not isinstance(self.prediction, list):
            raise RequestError(f"={self.prediction!r} must be a string or a list of token ids", param="prediction")
        self._check_token_ids("prediction", self.prediction)

    def _check_extra_args(self) -> None:
        if self.extra_args is None:
            return
        if not isinstance(self.extra_args, dict) or self.extra_args.keys() - {"kv_transfer_params"}:
            raise RequestError(
                f"={self.extra_args!r} must be a dict with no key but kv_transfer_params", param="extra_args"
            )
        given = self.extra_args.get("kv_transfer_params")
        if given is not None and not isinstance(given, dict):
            raise RequestError(f"={given!r} must be a dict", param="kv_transfer_params")
        _ = self.kv_transfer

    def _check_token_ids(self, name: str, token_ids: list[int]) -> None:
        for token_id in token_ids:
            if isinstance(token_id, bool) or not isinstance(token_id, int) or token_id < 0:
                raise RequestError(f"holds {token_id!r}; token ids are integers from 0", param=name)


def check_logprobs_mode(mode: object) -> None:
    """Raises RequestError unless this is one of LOGPROBS_MODES."""
    if mode not in LOGPROBS_MODES:
        raise RequestError(f"={mode!r} must be one of {', '.join(LOGPROBS_MODES)}", param="logprobs_mode")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
