"""Many requests of mixed lengths."""

import numpy as np
import pytest

from jaxis.bench.throughput import RequestShape, measure_throughput, request_mix
from jaxis.errors import RequestError


def test_a_mix_holds_every_length_about_equally_often():
    requests = request_mix(4000, [8, 64], [2, 16], np.random.default_rng(0))
    for shape in (RequestShape(i, o) for i in (8, 64) for o in (2, 16)):
        assert requests.count(shape) == pytest.approx(1000, rel=0.15)


def test_the_same_seed_gives_the_same_mix():
    first, second = (request_mix(20, [8, 64], [2, 16], np.random.default_rng(7)) for _ in range(2))
    assert first == second


def test_every_token_is_counted(batching_llm):
    requests = [RequestShape(*lengths) for lengths in ((5, 3), (20, 1), (9, 6), (30, 2), (7, 7)) * 3]
    result = measure_throughput(batching_llm.engine, requests, np.random.default_rng(0))
    assert (result.num_requests, result.num_input_tokens, result.num_output_tokens) == (15, 3 * 71, 3 * 19)
    assert result.requests_per_second == pytest.approx(15 / result.elapsed_seconds)
    assert result.output_tokens_per_second == pytest.approx(57 / result.elapsed_seconds)
    assert 0 < result.first_token_seconds_median <= result.first_token_seconds_p99 <= result.elapsed_seconds
    assert 0 < result.token_seconds_median <= result.token_seconds_p99
    assert result.num_preemptions == 0


def test_single_tokens_have_no_time_per_output_token(llm):
    result = measure_throughput(llm.engine, [RequestShape(5, 1)], np.random.default_rng(0))
    assert result.token_seconds_median is None


def test_a_request_too_long_for_the_engine_is_refused_and_leaves_it_idle(llm):
    requests = [RequestShape(5, 1), RequestShape(llm.max_model_len, 1)]
    with pytest.raises(RequestError, match="max_model_len="):
        measure_throughput(llm.engine, requests, np.random.default_rng(0))
    assert not llm.engine.has_unfinished
