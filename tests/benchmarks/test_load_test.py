"""A few seconds of the load test, on a server so small that requests wait, are refused and are preempted."""

import argparse
import asyncio

import pytest

from load_test import Sample, check_idle, load_test, main, memory_growth
from serving import request_mix
from serving.clients import Outcomes, idle_answers, run_clients
from serving.server_process import server_process

SMALL = ("--max-num-seqs", "4", "--max-num-batched-tokens", "64", "--kv-cache-memory", "4MiB", "--max-queued", "4")
SMALL += ("--model-alias", "*", "--reasoning-parser", "qwen3")


@pytest.fixture(scope="module")
def url():
    with server_process(SMALL) as url:
        yield url


@pytest.fixture(scope="module")
def mix():
    return [item for item in request_mix.request_mix() if item.body.get("max_tokens", 0) <= 64]


def test_all_is_well(url, mix, monkeypatch, capsys):
    monkeypatch.setattr("load_test.request_mix", lambda: mix)
    arguments = argparse.Namespace(clients=10, warmup=1.0, seconds=3.0, leave=0.3, max_growth=0.05, seed=0)
    assert asyncio.run(load_test(url, arguments)), capsys.readouterr().out
    report = dict(line.split(":", 1) for line in capsys.readouterr().out.splitlines() if ":" in line)
    assert int(report["right"].split()[0]) >= 10
    assert int(report["left"].split()[0]) >= 1
    assert int(report["refused 429"].split()[0]) >= 1
    assert int(report["sequences at once"].split()[0]) <= 4


def test_a_wrong_answer_and_a_failure_are_violations(url, mix):
    item = next(item for item in mix if item.name == "chat: logprobs")
    bad = request_mix.MixItem("bad", item.path, {**item.body, "temperature": -1})
    expected = asyncio.run(idle_answers(url, [item]))
    expected[item.name]["choices"][0]["logprobs"]["content"][1]["logprob"] -= 1e-6
    expected["bad"] = {}
    outcomes = Outcomes()
    load = {"num_clients": 2, "seconds": 0.3, "leave_share": 0.0, "seed": 0, "outcomes": outcomes}
    asyncio.run(run_clients(url, [item, bad], expected, **load))
    assert set(outcomes.counts) == {"wrong", "failed"}
    assert outcomes.num_violations == outcomes.counts.total()
    assert any("choice 0, logprobs" in text for text in outcomes.violations)
    assert any("status 400" in text and "temperature" in text for text in outcomes.violations)


def test_a_request_that_still_runs_is_a_leak(url, monkeypatch):
    monkeypatch.setattr("load_test.IDLE_SECONDS", 0.0)
    outcomes = Outcomes()

    async def stay_busy():
        body = {"prompt": "x", "max_tokens": 250, "ignore_eos": True}
        item = request_mix.MixItem("busy", "/v1/completions", body)
        while not outcomes.num_violations:
            await idle_answers(url, [item])

    async def check_while_busy():
        # A single request may be over before the first look at the metrics.
        async with asyncio.timeout(60):
            busy = asyncio.create_task(stay_busy())
            while not outcomes.num_violations:
                await check_idle(url, outcomes)
            await busy

    asyncio.run(check_while_busy())
    assert "num_requests_running" in outcomes.violations[0]


@pytest.mark.parametrize(("late", "growth"), [(100, 0.0), (120, 0.2)])
def test_memory_growth_is_that_after_the_first_quarter(late, growth):
    memory = [10, 50, 90, *[100] * 5, *[late] * 5]
    samples = [Sample(float(i), float(value), 0.0, 0.0) for i, value in enumerate(memory)]
    assert memory_growth(samples) == pytest.approx(growth)
    assert memory_growth(samples[:5]) is None


def test_a_server_that_does_not_start_is_reported():
    with pytest.raises(RuntimeError, match="no-such-option"):
        main(["--seconds", "1", "--", "--no-such-option"])
