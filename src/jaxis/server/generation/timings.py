"""Times and token counts of an answer, under llama-server's names."""

from __future__ import annotations

from pydantic import BaseModel

from jaxis.server.generation.answer_reader import AnswerCounts


class Timings(BaseModel):
    """Tokens and milliseconds of an answer's phases.

    Attributes:
      cache_n: Prompt tokens found in the prefix cache.
      prompt_n: Prompt tokens that were computed.
      prompt_ms: Time from the first step to the first token.
      prompt_per_second: Computed prompt tokens per second.
      predicted_n: Generated tokens.
      predicted_ms: Time from the first token to the last.
      predicted_per_second: Generated tokens per second, without the first token, which the prefill gives.
      draft_n, draft_n_accepted: Drafts, and drafts that were right.
      waiting_ms: Time from the request's arrival to its first step; llama-server does not have it.
    """

    cache_n: int
    prompt_n: int
    prompt_ms: float
    prompt_per_second: float | None
    predicted_n: int
    predicted_ms: float
    predicted_per_second: float | None
    draft_n: int
    draft_n_accepted: int
    waiting_ms: float

    @classmethod
    def of(cls, counts: AnswerCounts) -> Timings:
        """Returns the timings of the counts so far."""
        num_computed = counts.num_prompt_tokens - counts.num_cached_tokens
        prefill_seconds, decode_seconds = counts.prefill_seconds, counts.decode_seconds
        return cls(
            cache_n=counts.num_cached_tokens,
            prompt_n=num_computed,
            prompt_ms=1e3 * prefill_seconds,
            prompt_per_second=num_computed / prefill_seconds if prefill_seconds else None,
            predicted_n=counts.num_tokens,
            predicted_ms=1e3 * decode_seconds,
            predicted_per_second=(counts.num_tokens - 1) / decode_seconds if decode_seconds else None,
            draft_n=counts.num_drafts,
            draft_n_accepted=counts.num_accepted_drafts,
            waiting_ms=1e3 * counts.waiting_seconds,
        )
