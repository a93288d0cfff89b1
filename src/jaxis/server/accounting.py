"""Limits of API keys per minute, and counts of the tokens that requests take."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter

from jaxis.errors import RateLimitError
from jaxis.outputs import RequestOutput
from jaxis.server.http.api_keys import ApiKey, current_api_key
from jaxis.server.http.request_log import current_address
from jaxis.server.http.request_records import RequestRecord, current_record


@dataclass
class _Allowance:
    """A bucket that holds a minute's worth and refills evenly; it may be overdrawn."""

    per_minute: int
    level: float
    time: float

    def refill(self, per_minute: int, now: float) -> None:
        self.level = min(per_minute, self.level + (now - self.time) * self.per_minute / 60)
        self.per_minute, self.time = per_minute, now

    def seconds_until(self, level: float) -> float:
        return max(0.0, level - self.level) * 60 / self.per_minute


class KeyLimits:
    """Limits of requests and tokens for each key, by a monotonic clock in seconds.

    A request is admitted while its key has a request and any tokens left. Its number of tokens is known only once it is
    served; if it overdraws the bucket, later requests wait.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._allowances: dict[tuple[str, str], _Allowance] = {}

    def admit(self, key: ApiKey) -> None:
        """Counts a request. Raises RateLimitError, and counts nothing, if the key's limit of this minute is spent."""
        requests = self._allowance(key, "requests", key.requests_per_minute)
        tokens = self._allowance(key, "tokens", key.tokens_per_minute)
        for allowance, what, needed in ((requests, "requests", 1.0), (tokens, "tokens", 1.0)):
            if allowance is not None and allowance.level < needed:
                seconds = max(1, math.ceil(allowance.seconds_until(needed)))
                raise RateLimitError(
                    f"the key {key.name} has used up its {allowance.per_minute} {what} per minute: "
                    f"try again in {seconds}s",
                    seconds,
                    limit=what,
                )
        if requests is not None:
            requests.level -= 1

    def spend(self, key: ApiKey, num_tokens: int) -> None:
        allowance = self._allowance(key, "tokens", key.tokens_per_minute)
        if allowance is not None:
            allowance.level -= num_tokens

    def _allowance(self, key: ApiKey, what: str, per_minute: int | None) -> _Allowance | None:
        if per_minute is None:
            return None
        now = self._clock()
        allowance = self._allowances.setdefault((key.sha256, what), _Allowance(per_minute, per_minute, now))
        allowance.refill(per_minute, now)  # the limit may have changed
        return allowance


class KeyMetrics:
    """Counters with the label `api_key`, the key's name."""

    def __init__(self, registry: CollectorRegistry, prefix: str = "jaxis") -> None:
        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"{prefix}:{name}", text, ("api_key", *labels), registry=registry)

        self._requests = counter("api_key_requests", "Requests that generate, by the name of their API key.")
        self._refused = counter("api_key_rejections", "Requests over a limit of their API key.", "limit")
        self._prompt = counter("api_key_prompt_tokens", "Prompt tokens, by the name of the API key.")
        self._cached = counter("api_key_prompt_tokens_cached", "Those of them that the prefix cache held.")
        self._generated = counter("api_key_generation_tokens", "Generated tokens, by the name of the API key.")

    @contextmanager
    def admission(self, name: str) -> Iterator[None]:
        """Counts a request that the block admits, or refuses with a RateLimitError."""
        try:
            yield
        except RateLimitError as error:
            self._refused.labels(name, error.limit).inc()
            raise
        self._requests.labels(name).inc()

    def add(self, name: str, num_prompt: int, num_cached: int, num_generated: int) -> None:
        for counter, number in (
            (self._prompt, num_prompt),
            (self._cached, num_cached),
            (self._generated, num_generated),
        ):
            if number:
                counter.labels(name).inc(number)


class UsageAccounting:
    """Admits requests by their keys' limits, and counts their tokens."""

    def __init__(self, metrics: KeyMetrics, limits: KeyLimits | None = None) -> None:
        self._metrics = metrics
        self._limits = limits or KeyLimits()

    def admit(self) -> None:
        """Counts a request of the current key, if it needs one.

        Raises RateLimitError if the key has used up its limit for this minute.
        """
        if (key := current_api_key.get()) is not None:
            with self._metrics.admission(key.name):
                self._limits.admit(key)

    def priority(self, asked: int) -> int:
        """Returns the priority of a request of the current key: as asked for, or worse if the key demands it."""
        key = current_api_key.get()
        return asked if key is None or key.priority is None else max(asked, key.priority)

    def client(self) -> str | None:
        """Returns an id of the current request's client: the digest of its key or, without keys, its address.

        Clients share steps fairly, and see only what their own requests left behind.
        """
        key = current_api_key.get()
        return current_address.get() if key is None else key.sha256

    def start(self) -> PromptUsage | None:
        """Starts to count one prompt and its answer; None if the server has neither keys nor a request log."""
        key, record = current_api_key.get(), current_record.get()
        return None if key is None and record is None else PromptUsage(self._metrics, self._limits, key, record)


class PromptUsage:
    """Counts one prompt and its completions as their outputs arrive."""

    def __init__(
        self, metrics: KeyMetrics, limits: KeyLimits, key: ApiKey | None, record: RequestRecord | None
    ) -> None:
        self._metrics, self._limits = metrics, limits
        self._key, self._record = key, record
        self._has_begun = False

    def add_prompt(self, num_tokens: int) -> None:
        if self._key is not None:
            self._limits.spend(self._key, num_tokens)
            self._metrics.add(self._key.name, num_tokens, 0, 0)
        if self._record is not None:
            self._record.prompt_tokens += num_tokens

    def add(self, output: RequestOutput) -> None:
        num_prompt = 0 if self._has_begun else len(output.prompt_token_ids)
        num_cached = 0 if self._has_begun else output.num_cached_tokens
        self._has_begun = True
        num_generated = sum(len(completion.token_ids) for completion in output.outputs)
        if self._key is not None:
            self._limits.spend(self._key, num_prompt + num_generated)
            self._metrics.add(self._key.name, num_prompt, num_cached, num_generated)
        if self._record is not None:
            self._record.add(output, num_prompt, num_cached, num_generated)
