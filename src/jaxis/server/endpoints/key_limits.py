"""What each API key may still ask for: requests and tokens by the minute."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from jaxis.errors import RateLimitError
from jaxis.server.http.api_keys import ApiKey


@dataclass
class _Allowance:
    """A bucket that holds a minute's worth and refills evenly; may be overdrawn."""

    per_minute: int
    level: float
    time: float

    def refill(self, per_minute: int, now: float) -> None:
        self.level = min(per_minute, self.level + (now - self.time) * self.per_minute / 60)
        self.per_minute, self.time = per_minute, now

    def seconds_until(self, level: float) -> float:
        return max(0.0, level - self.level) * 60 / self.per_minute


class KeyLimits:
    """Counts the requests and tokens of each key.

    A request is taken while the key has a request and any tokens left. How many tokens it takes is known only when it
    is served; what is overdrawn then is waited for by those that follow.

    Args:
      clock: Seconds, on a clock that does not go back.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._allowances: dict[tuple[str, str], _Allowance] = {}

    def admit(self, key: ApiKey) -> None:
        """Counts a request.

        Raises:
          RateLimitError: The key has used up its minute; nothing is counted.
        """
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
        """Counts tokens of a prompt or an answer."""
        allowance = self._allowance(key, "tokens", key.tokens_per_minute)
        if allowance is not None:
            allowance.level -= num_tokens

    def _allowance(self, key: ApiKey, what: str, per_minute: int | None) -> _Allowance | None:
        if per_minute is None:
            return None
        now = self._clock()
        allowance = self._allowances.setdefault((key.name, what), _Allowance(per_minute, per_minute, now))
        allowance.refill(per_minute, now)  # of a limit that may have changed since
        return allowance
