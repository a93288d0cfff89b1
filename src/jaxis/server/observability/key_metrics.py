"""Usage by API key, for Prometheus. Keys appear by their names only."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, Counter

from jaxis.errors import RateLimitError


class KeyMetrics:
    """Counters with the label `api_key`, the key's name.

    Args:
      registry: Where they are found.
      prefix: What their names begin with.
    """

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
        """Counts a request that the block admits, or refuses by a RateLimitError."""
        try:
            yield
        except RateLimitError as error:
            self._refused.labels(name, error.limit).inc()
            raise
        self._requests.labels(name).inc()

    def add(self, name: str, num_prompt: int, num_cached: int, num_generated: int) -> None:
        """Counts tokens."""
        for counter, number in (
            (self._prompt, num_prompt),
            (self._cached, num_cached),
            (self._generated, num_generated),
        ):
            if number:
                counter.labels(name).inc(number)
