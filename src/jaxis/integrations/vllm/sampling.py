"""Conversion of vLLM's sampling parameters: each is applied, or refused by name. Imports no JAX, torch or vLLM."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxis.errors import RequestError
from jaxis.sampling_params import LogprobsMode, SamplingParams

_SAME = (
    *("temperature", "top_k", "top_p", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty"),
    *("logit_bias", "allowed_token_ids", "seed", "logprobs", "prompt_logprobs", "min_tokens"),
)
APPLIED = (*_SAME, "structured_outputs", "bad_words", "_bad_words_token_ids", "_all_stop_token_ids")
"""Parameters that the worker applies, by vLLM's names."""

OF_VLLM = (
    *("n", "stop", "stop_token_ids", "ignore_eos", "max_tokens", "flat_logprobs", "detokenize", "skip_special_tokens"),
    *("spaces_between_special_tokens", "include_stop_str_in_output", "output_kind", "stream_interval", "skip_clone"),
    *("output_text_buffer_length", "_eos_token_id", "_watermarking_skipped", "skip_reading_prefix_cache"),
    "repetition_detection",
)
"""Parameters that vLLM's scheduler or front end applies: stop conditions, text, and delivery of outputs."""

REFUSED = {
    "watermarking": "tokens have no watermark here: leave it out",
    "prompt_logprob_token_ids": "only the likeliest tokens of a prompt are scored: use prompt_logprobs",
    "prompt_logprob_start": "prompts are scored from their start: leave it out",
    "logprob_token_ids": "only the likeliest tokens are scored: use logprobs",
    "extra_args": "nothing reads them here: leave it out",
    "thinking_token_budget": "the end of thinking is not forced inside vLLM: leave it out, or use jaxis serve",
    "routed_experts_prompt_start": "the experts of tokens are not returned inside vLLM: leave it out",
    "trace_decode_token_ids": "tokens are sampled, not replayed: leave it out",
}
"""Parameters that are not supported, with the advice to the user."""


def check_params(params: Any) -> None:
    """Raises RequestError for a set parameter that would not be applied, known or not.

    Args:
      params: vLLM's SamplingParams.
    """
    names, defaults = params.__struct_fields__, params.__struct_defaults__  # every field has a default
    for name, default in zip(names, defaults, strict=True):
        if name in APPLIED or name in OF_VLLM:
            continue
        if _asks_for_something(getattr(params, name), default):
            reason = REFUSED.get(name, "this version of jaxis does not know it: leave it out")
            raise RequestError(f"is not supported: {reason}", param=name)
    for name in ("logprobs", "prompt_logprobs"):
        if getattr(params, name) == -1:
            raise RequestError(
                "=-1 is not supported inside vLLM: give the number of tokens wanted, up to 20", param=name
            )


def _asks_for_something(value: Any, default: Any) -> bool:
    if value is None or value is False:
        return False
    if isinstance(value, (bool, int, float, str)):
        return value != default
    return len(value) > 0


def translate_params(params: Any, logprobs_mode: LogprobsMode | None = None) -> SamplingParams:
    """Converts the parameters that the sampler applies.

    Args:
      params: vLLM's SamplingParams.
      logprobs_mode: Mode of the engine; None: the default.

    Raises:
      RequestError: A parameter is not supported, or out of jaxis' range.
    """
    check_params(params)
    values = {name: getattr(params, name) for name in _SAME}
    # The scheduler ends sequences; the stop tokens are only suppressed until `min_tokens`.
    return SamplingParams(
        **values,
        max_tokens=None,
        stop_token_ids=sorted(params._all_stop_token_ids) if params.min_tokens else [],
        bad_words=list(params.bad_words or []),
        logprobs_mode=logprobs_mode,
    )


class GivenMasks:
    """A `Matcher` whose grammar is followed elsewhere. Each step brings masks for the next token and after each draft.

    Attributes:
      param: Name of the parameter, as in `Matcher`.
      error: Error as in `Matcher`; always None here.
      is_complete: Always False; the scheduler ends the sequence.
      may_favor: False; no token is favored.

    Args:
      vocab_size: V.
    """

    param = "structured_outputs"
    error: str | None = None
    is_complete = may_favor = False

    def __init__(self, vocab_size: int) -> None:
        self._masks = np.zeros((1, -(-vocab_size // 32)), np.int32)
        self._spare_bits = -vocab_size % 32
        self._num_followed = 0
        self._first_draft: int | None = None  # in a fork: number of tokens before the drafts that it follows

    def set_masks(self, rows: np.ndarray | None) -> None:
        """Sets the masks of a step.

        Args:
          rows: int32 [1 + drafts, W], bit i % 32 of word i / 32 for token i; the first row for the next token, then one
            after each draft. Tokens of the model that the tokenizer does not have are forbidden. Further tokens of the
            tokenizer are ignored, because the model cannot sample them. None allows all.
        """
        num_rows, num_words = 1 if rows is None else len(rows), self._masks.shape[1]
        masks = np.full((num_rows, num_words), -1 if rows is None else 0, np.int32)
        if rows is not None:
            width = min(rows.shape[1], num_words)
            masks[:, :width] = rows[:, :width]
        if self._spare_bits:
            masks[:, -1] &= np.int32((1 << (32 - self._spare_bits)) - 1)
        self._masks = masks

    def fork(self) -> GivenMasks:
        """Returns a copy that follows drafts."""
        fork = copy.copy(self)
        fork._first_draft = self._num_followed
        return fork

    def follow(self, output_token_ids: Sequence[int]) -> None:
        """Records the number of output tokens; the scheduler follows the output itself."""
        self._num_followed = len(output_token_ids)

    def token_mask(self) -> np.ndarray:
        return self._masks[0 if self._first_draft is None else self._num_followed - self._first_draft]

    def favored_token(self) -> int | None:
        return None
