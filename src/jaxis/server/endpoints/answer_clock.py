"""Counts an answer's tokens and measures its phases."""

from __future__ import annotations

import time

from jaxis.outputs import RequestOutput


class AnswerClock:
    """Follows one answer from the request's arrival, which is when it is made.

    Attributes:
      num_prompt_tokens, num_cached_tokens: Tokens of the prompt, and how many of them the prefix cache held.
      num_tokens: Generated tokens.
    """

    def __init__(self) -> None:
        self._arrival = self._first_step = self._first_token = self._last_token = time.monotonic()
        self.num_prompt_tokens = self.num_cached_tokens = self.num_tokens = 0

    def take(self, output: RequestOutput) -> None:
        """Adds an output."""
        self._last_token = time.monotonic()
        if self.num_tokens == 0:
            self._first_token = output.first_token_time or self._last_token
            self._first_step = min(output.first_scheduled_time or self._first_token, self._first_token)
            self.num_prompt_tokens, self.num_cached_tokens = len(output.prompt_token_ids), output.num_cached_tokens
        self.num_tokens += sum(len(completion.token_ids) for completion in output.outputs)

    @property
    def total_seconds(self) -> float:
        """From the arrival to now."""
        return time.monotonic() - self._arrival

    @property
    def waiting_seconds(self) -> float:
        """From the arrival to the first step."""
        return max(0.0, self._first_step - self._arrival)

    @property
    def prefill_seconds(self) -> float:
        """From the first step to the first token."""
        return self._first_token - self._first_step

    @property
    def decode_seconds(self) -> float:
        """From the first token to the last."""
        return max(0.0, self._last_token - self._first_token)
