"""The figures of a load, from times that were made up."""

import dataclasses

import numpy as np
import pytest

from jaxis.bench.cost import DecodeCost, PrefillCost
from jaxis.bench.latency import measure_latency, summarize
from jaxis.bench.limits import Limits
from jaxis.bench.run import BatchRun, Load
from jaxis.engine.speculation import DraftCounts

LIMITS = Limits(4, read_bytes_per_second=10_000.0, copy_bytes_per_second=15_000.0, flops_per_second=1e6)
DECODE = DecodeCost(weight_bytes=1000, kv_bytes_per_token=10)
PREFILL = PrefillCost(layer_params=1000, head_params=0, attention_flops_per_key=0)


def test_figures_are_medians_and_shares_count_the_context():
    load = Load(batch_size=2, input_len=50, output_len=3)
    runs = [
        BatchRun([0.5, 1.0], [0.2, 0.5], context_len=50.0, num_step_tokens=4),
        BatchRun([1.5, 2.5], [0.4, 0.4], context_len=50.0, num_step_tokens=4),
        BatchRun([1.0, 2.0], [0.3, 0.4], context_len=50.0, num_step_tokens=4),
    ]
    result = summarize(load, runs, DECODE, PREFILL, LIMITS)
    assert result.prefill_seconds == 2.0
    assert result.time_to_first_token_seconds == 1.5
    assert result.prefill_tokens_per_second == 2 * 50 / 2.0
    assert result.prefill_share_of_limit == pytest.approx(2 * 2 * 1000 * 50 / 1e6 / 2.0)
    assert result.decode_step_seconds == 0.4
    assert result.decode_steps_per_second == 2.5
    assert result.decode_tokens_per_second == 5.0
    assert (result.decode_weight_bytes, result.decode_kv_bytes) == (1000, 2 * 50 * 10)
    assert result.decode_share_of_limit == pytest.approx((1000 + 1000) / 10_000 / 0.4)


def test_with_drafts_a_step_gives_more_tokens_than_requests():
    runs = [BatchRun([1.0], [0.2, 0.5], context_len=50.0, num_step_tokens=tokens) for tokens in (9, 5)]
    drafts = DraftCounts(10, 40, 10, [6, 3, 1, 0])
    result = summarize(Load(2, 50, 3), runs, DECODE, PREFILL, LIMITS, drafts)
    assert result.decode_tokens_per_second == pytest.approx(14 / 1.4)
    figures = result.to_json()
    assert figures["spec_decode_acceptance_length"] == 2.0
    assert figures["spec_decode_acceptance_rate"] == 25.0
    assert figures["spec_decode_per_position_acceptance_rates"] == [0.6, 0.3, 0.1, 0.0]
    assert "drafts" not in figures


def test_without_decode_steps_their_figures_are_none():
    result = summarize(Load(1, 50, 1), [BatchRun([1.0], [], 0.0, 0)], DECODE, PREFILL, LIMITS)
    assert result.prefill_tokens_per_second == 50
    values = dataclasses.asdict(result)
    decode = {name for name in values if name.startswith("decode")} | {"context_len", "drafts"}
    assert all((values[name] is None) == (name in decode) for name in values)


def test_the_limit_is_the_copy_s_where_reading_was_not_measured():
    copy = dataclasses.replace(LIMITS, read_bytes_per_second=None)
    assert (LIMITS.memory_bytes_per_second, copy.memory_bytes_per_second) == (10_000.0, 15_000.0)


def test_a_measured_load_agrees_with_itself(llm):
    limits = Limits(1, 1e9, 1e9, 1e9)
    result = measure_latency(llm.engine, Load(1, 10, 4), limits, repeats=2, rng=np.random.default_rng(0))
    assert result.prefill_tokens_per_second == pytest.approx(10 / result.prefill_seconds)
    assert result.decode_steps_per_second == pytest.approx(1 / result.decode_step_seconds)
    num_bytes = result.decode_weight_bytes + result.decode_kv_bytes
    assert result.decode_share_of_limit == pytest.approx(num_bytes / 1e9 * result.decode_steps_per_second)
