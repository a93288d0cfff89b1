"""Requests and tokens by the minute, on a clock that the test turns."""

import pytest

from jaxis.errors import RateLimitError
from jaxis.server.accounting import KeyLimits
from jaxis.server.http.api_keys import ApiKey


class Clock:
    now = 1000.0

    def __call__(self):
        return self.now


def refused(limits, key):
    with pytest.raises(RateLimitError) as raised:
        limits.admit(key)
    return raised.value


def test_requests_come_back_evenly():
    limits, key = KeyLimits(clock := Clock()), ApiKey("a", "", requests_per_minute=6)
    for _ in range(6):
        limits.admit(key)
    assert refused(limits, key).retry_after_seconds == 10
    clock.now += 9.5
    assert refused(limits, key).retry_after_seconds == 1
    clock.now += 0.5
    limits.admit(key)
    assert refused(limits, key).retry_after_seconds == 10
    clock.now += 3600
    for _ in range(6):  # and no more than a minute's worth is saved up
        limits.admit(key)
    assert refused(limits, key).limit == "requests"


def test_tokens_may_be_overdrawn_once():
    limits, key = KeyLimits(clock := Clock()), ApiKey("a", "", tokens_per_minute=60)
    limits.admit(key)
    limits.spend(key, 100)
    error = refused(limits, key)
    assert (error.limit, error.retry_after_seconds) == ("tokens", 41)
    clock.now += 41
    limits.admit(key)


def test_a_refused_request_costs_nothing():
    limits, key = KeyLimits(clock := Clock()), ApiKey("a", "", requests_per_minute=2, tokens_per_minute=60)
    limits.admit(key)
    limits.spend(key, 61)
    for _ in range(5):
        assert refused(limits, key).limit == "tokens"
    clock.now += 2
    limits.admit(key)


def test_keys_have_their_own_and_a_limit_may_change():
    limits, clock = KeyLimits(clock := Clock()), clock
    a, b = ApiKey("default", "a", requests_per_minute=1), ApiKey("default", "b", requests_per_minute=1)
    limits.admit(a)
    limits.admit(b)
    refused(limits, a)
    limits.admit(ApiKey("default", "a"))  # its limit was taken away
    clock.now += 60
    for _ in range(1):
        limits.admit(ApiKey("default", "a", requests_per_minute=100))
    refused(limits, ApiKey("default", "a", requests_per_minute=100))  # what was saved up was of the old limit
