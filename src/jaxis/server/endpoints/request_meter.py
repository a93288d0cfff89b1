"""Counts what a request takes: for its key's limits and usage, and for the request log."""

from __future__ import annotations

from jaxis.outputs import RequestOutput
from jaxis.server.endpoints.key_limits import KeyLimits
from jaxis.server.http.api_keys import ApiKey, current_api_key
from jaxis.server.http.request_records import RequestRecord, current_record
from jaxis.server.observability.key_metrics import KeyMetrics


class UsageMeter:
    """Admits requests by their keys' limits, and counts what they take.

    Args:
      metrics: Usage by key.
      limits: What keys may still ask for.
    """

    def __init__(self, metrics: KeyMetrics, limits: KeyLimits | None = None) -> None:
        self._metrics = metrics
        self._limits = limits or KeyLimits()

    def admit(self) -> None:
        """Counts a request of the current key, if it needs one.

        Raises:
          RateLimitError: Its key has used up its minute.
        """
        if (key := current_api_key.get()) is not None:
            with self._metrics.admission(key.name):
                self._limits.admit(key)

    def priority(self, asked: int) -> int:
        """The priority of a request of the current key: as asked for, or worse if the key demands it."""
        key = current_api_key.get()
        return asked if key is None or key.priority is None else max(asked, key.priority)

    def start(self) -> PromptMeter | None:
        """Begins to count one prompt and its answer; None if nobody wants to know."""
        key, record = current_api_key.get(), current_record.get()
        return None if key is None and record is None else PromptMeter(self._metrics, self._limits, key, record)


class PromptMeter:
    """Counts one prompt and its completions as their outputs arrive."""

    def __init__(
        self, metrics: KeyMetrics, limits: KeyLimits, key: ApiKey | None, record: RequestRecord | None
    ) -> None:
        self._metrics, self._limits = metrics, limits
        self._key, self._record = key, record
        self._has_begun = False

    def add(self, output: RequestOutput) -> None:
        """Adds a step's output."""
        num_prompt = 0 if self._has_begun else len(output.prompt_token_ids)
        num_cached = 0 if self._has_begun else output.num_cached_tokens
        self._has_begun = True
        num_generated = sum(len(completion.token_ids) for completion in output.outputs)
        if self._key is not None:
            self._limits.spend(self._key, num_prompt + num_generated)
            self._metrics.add(self._key.name, num_prompt, num_cached, num_generated)
        if self._record is not None:
            self._record.add(output, num_prompt, num_cached, num_generated)
