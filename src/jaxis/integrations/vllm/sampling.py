"""vLLM's sampling parameters in jaxis' terms: each is applied, or refused by name. Imports no JAX, torch or vLLM."""

from __future__ import annotations

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
"""What the worker applies, by vLLM's names."""

OF_VLLM = (
    *("n", "stop", "stop_token_ids", "ignore_eos", "max_tokens", "flat_logprobs", "detokenize", "skip_special_tokens"),
    *("spaces_between_special_tokens", "include_stop_str_in_output", "output_kind", "stream_interval", "skip_clone"),
    *("output_text_buffer_length", "_eos_token_id", "_watermarking_skipped", "skip_reading_prefix_cache"),
    "repetition_detection",
)
"""What vLLM's scheduler or front end applies: when to stop, text, and how outputs are sent."""

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
"""What nothing applies, and what to do instead."""


def check_params(params: Any) -> None:
    """Raises a RequestError for a parameter that would not be applied, known or not.

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
    """The parameters that the sampler applies.

    Args:
      params: vLLM's SamplingParams.
      logprobs_mode: The engine's; None: the default.

    Raises:
      RequestError: A parameter is not supported, or outside of what jaxis accepts.
    """
    check_params(params)
    values = {name: getattr(params, name) for name in _SAME}
    # How a sequence ends is the scheduler's affair: these are held back until `min_tokens`.
    return SamplingParams(
        **values,
        max_tokens=None,
        stop_token_ids=sorted(params._all_stop_token_ids) if params.min_tokens else [],
        bad_words=list(params.bad_words or []),
        logprobs_mode=logprobs_mode,
    )


class GivenMask:
    """A `Matcher` whose grammar is followed elsewhere: each step brings the mask of the next token.

    Attributes:
      param: See `Matcher`.
      error: See `Matcher`; none here.
      is_complete: See `Matcher`; the scheduler ends the sequence.

    Args:
      vocab_size: V.
    """

    param = "structured_outputs"
    error: str | None = None
    is_complete = False

    def __init__(self, vocab_size: int) -> None:
        self._mask = np.zeros(-(-vocab_size // 32), np.int32)
        self._spare_bits = -vocab_size % 32

    def set_mask(self, row: np.ndarray | None) -> None:
        """Takes the mask of the next token.

        Args:
          row: int32 [W], bit i % 32 of word i / 32 for token i. A tokenizer may have fewer tokens than the model, which
            are then forbidden, or more, which the model cannot sample. None allows all.
        """
        mask = np.full_like(self._mask, -1 if row is None else 0)
        if row is not None:
            width = min(len(row), len(mask))
            mask[:width] = row[:width]
        if self._spare_bits:
            mask[-1] &= np.int32((1 << (32 - self._spare_bits)) - 1)
        self._mask = mask

    def fork(self) -> GivenMask:
        """See `Matcher`."""
        raise NotImplementedError("masks of drafts are not followed here")

    def follow(self, output_token_ids: Sequence[int]) -> None:
        """See `Matcher`; the scheduler follows the output."""

    def token_mask(self) -> np.ndarray:
        """See `Matcher`."""
        return self._mask

    def favored_token(self) -> int | None:
        """See `Matcher`."""
        return None
