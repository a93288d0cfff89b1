"""`jaxis bench serve` against a server whose delays and counts are known."""

import collections
import json

import numpy as np
import pytest
from prometheus_client import CollectorRegistry, Counter, generate_latest
from typer.testing import CliRunner

from jaxis.bench.serving.dataset import NUM_TOKEN_IDS, arrival_times, random_requests
from jaxis.cli.main import app
from serving.stub_server import PROMPT_TOKENS

SLACK_MS = 60  # of a busy machine, on what is a sleep otherwise


@pytest.fixture
def measure(tmp_path):
    """Runs the command; returns what it printed and the figures that it wrote."""

    def run(url, *arguments):
        file = ("--save-result", "--save-detailed", "--result-dir", tmp_path, "--result-filename", "result.json")
        result = CliRunner().invoke(app, ["bench", "serve", "--base-url", url, *map(str, (*file, *arguments))])
        assert result.exit_code == 0, result.output
        return result.stdout, json.loads((tmp_path / "result.json").read_text())

    return run


@pytest.mark.sampled
@pytest.mark.parametrize("endpoint", ["/v1/completions", "/v1/chat/completions"])
def test_latencies_are_the_servers_delays_and_tokens_are_those_it_counts(serve_stub, measure, endpoint):
    url, stub = serve_stub(first_seconds=0.05, gap_seconds=0.03, tokens_per_event=2)
    load = ("--num-prompts", 12, "--max-concurrency", 4, "--random-output-len", 9, "--num-warmups", 2)
    text, report = measure(url, "--endpoint", endpoint, *load)
    assert (report["completed"], report["failed"], stub.num_requests, stub.most_open) == (12, 0, 14, 4)
    assert (report["total_input_tokens"], report["total_output_tokens"]) == (12 * PROMPT_TOKENS, 12 * 9)
    assert report["tokens_per_event"] == pytest.approx(9 / 5)
    assert 50 <= report["median_ttft_ms"] < 50 + SLACK_MS
    assert 28 <= report["median_itl_ms"] < 30 + SLACK_MS
    # Five events bring nine tokens: eight of them after the first, in four gaps.
    assert 14 <= report["median_tpot_ms"] < 15 + SLACK_MS / 2
    assert 165 <= report["median_e2el_ms"] < 170 + 2 * SLACK_MS
    assert report["duration"] >= 3 * 0.165  # three rounds of four
    assert report["output_throughput"] == pytest.approx(12 * 9 / report["duration"])
    assert report["request_throughput"] == pytest.approx(12 / report["duration"])
    assert [len(gaps) for gaps in report["itls"]] == [4] * 12
    assert report["generated_texts"] == ["word " * 9] * 12
    for line in ("12 requests, all due at once, at most 4 at once", "84 in, 108 out", "tokens per event:   1.80"):
        assert line in text


def test_drafts_are_those_that_the_server_counted_meanwhile(serve_stub, measure):
    """After the warm-up of two requests, and by two engines."""

    def metrics(num_requests):
        registry = CollectorRegistry()
        for name, value in (("drafts", 10), ("draft_tokens", 30), ("accepted_tokens", 12)):
            counter = Counter(f"vllm:spec_decode_num_{name}", "", ["engine"], registry=registry)
            for engine in "01":
                counter.labels(engine).inc(value * num_requests)
        places = Counter("vllm:spec_decode_num_accepted_tokens_per_pos", "", ["engine", "position"], registry=registry)
        for position, value in enumerate((7, 4, 1)):
            for engine in "01":
                places.labels(engine, str(position)).inc(value * num_requests)
        return generate_latest(registry).decode()

    url, _ = serve_stub(metrics=metrics)
    text, report = measure(url, "--num-prompts", 4, "--num-warmups", 2, "--random-output-len", 2)
    assert (report["spec_decode_num_drafts"], report["spec_decode_draft_tokens"]) == (80, 240)
    assert report["spec_decode_acceptance_length"] == pytest.approx(1 + 12 / 10)
    assert report["spec_decode_acceptance_rate"] == pytest.approx(40.0)
    assert report["spec_decode_per_position_acceptance_rates"] == pytest.approx([0.7, 0.4, 0.1])
    assert "80 of 3.0 tokens, 40% of them right; mean acceptance length 2.20" in text
    assert "position 1, 2, ...: 0.70 0.40 0.10" in text


def test_requests_held_back_count_from_when_they_were_due(serve_stub, measure):
    """One place, 20 ms of service, and arrivals every 5 ms: each request's wait is that of the queue before it."""
    url, _ = serve_stub(first_seconds=0.02)
    load = ("--request-rate", 200, "--burstiness", 1000, "--max-concurrency", 1, "--random-output-len", 1)
    _, report = measure(url, "--num-prompts", 20, *load)
    ttfts = report["ttfts"]
    assert all(ttfts[i] >= 0.02 + 0.012 * i for i in range(20))
    assert ttfts[-1] == pytest.approx(report["duration"] - 19 * 0.005, rel=0.1)
    assert report["p99_send_delay_ms"] >= 200


def test_without_a_limit_no_request_waits_for_another(serve_stub, measure):
    url, stub = serve_stub(first_seconds=0.2)
    text, report = measure(url, "--num-prompts", 30, "--request-rate", 300, "--random-output-len", 1)
    assert stub.most_open > 20
    assert report["median_ttft_ms"] < 200 + SLACK_MS
    assert report["request_rate"] == 300
    assert "30 requests, 300 a second" in text


def test_failures_are_counted_by_their_reason_and_are_in_no_figure(serve_stub, measure):
    faults = {2: "status", 3: "cut", 4: "error event", 7: "status"}
    url, _ = serve_stub(fault=faults.get)
    text, report = measure(url, "--num-prompts", 10, "--num-warmups", 0, "--random-output-len", 4)
    assert (report["completed"], report["failed"]) == (6, 4)
    assert report["total_output_tokens"] == 6 * 4
    assert report["errors"]["status 429: the stub is busy"] == 2
    assert report["errors"]["the stub failed"] == 1
    assert sum(report["errors"].values()) == 4
    assert collections.Counter(error is None for error in report["request_errors"]) == {True: 6, False: 4}
    assert "2 x status 429: the stub is busy" in text


def test_a_server_that_counts_no_tokens_gets_no_invented_ones(serve_stub, measure):
    url, _ = serve_stub(usage=False)
    text, report = measure(url, "--num-prompts", 3, "--random-output-len", 4)
    assert report["completed"] == 3
    assert [report[name] for name in ("total_output_tokens", "output_throughput", "median_tpot_ms")] == [None] * 3
    assert report["median_ttft_ms"] > 0
    assert "not counted by the server" in text


def test_goodput_counts_requests_within_every_limit(serve_stub, measure):
    url, _ = serve_stub(first_seconds=0.02)
    for limits, share in ((("ttft:10000", "tpot:10000"), 1), (("ttft:10000", "e2el:1"), 0)):
        options = [option for limit in limits for option in ("--goodput", limit)]
        _, report = measure(url, "--num-prompts", 4, "--random-output-len", 2, *options)
        assert report["request_goodput"] == pytest.approx(share * report["request_throughput"])


def test_what_is_sent(serve_stub, measure, tmp_path):
    url, stub = serve_stub()
    options = ("--num-warmups", 0, "--num-prompts", 2, "--seed", 3)
    measure(url, *options, "--random-input-len", 5, "--random-output-len", 6, "--ignore-eos", "--model", "other")
    measure(url, *options, "--random-input-len", 5, "--random-output-len", 6, "--extra-body", '{"top_k": 1}')
    first, again = stub.bodies[:2], stub.bodies[2:]
    assert [body["prompt"] for body in first] == [body["prompt"] for body in again]
    assert {len(body["prompt"]) for body in first} == {5}
    assert {"model": "other", "max_tokens": 6, "ignore_eos": True, "temperature": 0.0}.items() <= first[0].items()
    assert again[0]["model"] == "stub"
    assert again[0]["top_k"] == 1
    assert "ignore_eos" not in again[0]

    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "one", "output_tokens": 3}\n\n{"messages": [{"role": "user", "content": "two"}]}\n')
    chat = ("--endpoint", "/v1/chat/completions", "--output-len", 9)
    measure(url, *options, *chat, "--dataset-name", "custom", "--dataset-path", file)
    asked = {body["messages"][0]["content"]: body["max_tokens"] for body in stub.bodies[4:]}
    assert asked == {"one": 3, "two": 9}

    file.write_text(
        json.dumps([{"conversations": [{"from": "human", "value": "three"}, {"from": "gpt", "value": "-"}]}])
    )
    measure(url, *options, "--dataset-name", "sharegpt", "--dataset-path", file)
    assert [body["prompt"] for body in stub.bodies[6:]] == ["three", "three"]


def test_random_lengths_are_within_the_ratio():
    requests = random_requests(np.random.default_rng(0), 400, input_len=20, output_len=10, range_ratio=0.5, chat=False)
    lengths = [(len(request.prompt), request.output_len) for request in requests]
    assert {length for length, _ in lengths} == set(range(10, 31))
    assert {length for _, length in lengths} == set(range(5, 16))
    assert max(max(request.prompt) for request in requests) < NUM_TOKEN_IDS


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 16.0])
def test_arrivals_have_the_rate_and_the_burstiness(burstiness):
    gaps = np.diff(arrival_times(np.random.default_rng(0), 20_000, 40.0, burstiness))
    assert np.mean(gaps) == pytest.approx(1 / 40, rel=0.05)
    assert np.std(gaps) / np.mean(gaps) == pytest.approx(burstiness**-0.5, rel=0.05)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--base-url", "http://127.0.0.1:9"), "cannot be reached"),
        (("--base-url", "http://127.0.0.1:9", "--model", "m"), "the warm-up request"),
        (("--base-url", "http://127.0.0.1:9", "--model", "m", "--num-warmups", "0"), "all 100 requests failed"),
        (("--dataset-name", "custom"), "--dataset-path"),
        (("--dataset-name", "custom", "--dataset-path", "nowhere.jsonl"), "nowhere.jsonl"),
        (("--save-result", "--result-dir", "nowhere"), "--result-dir"),
    ],
)
def test_mistakes_are_errors_of_one_line(arguments, message):
    result = CliRunner().invoke(app, ["bench", "serve", *arguments])
    assert result.exit_code == 1
    [line] = result.stderr.strip().splitlines()
    assert line.startswith("jaxis: error: ")
    assert message in line


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"text": "x"}', "line 1 has neither"),
        ('{"prompt": "x", "output_tokens": 0}', "output_tokens=0"),
        ("not json", "line 1 is not JSON"),
        ("", "holds no prompt"),
        ('{"messages": [{"role": "user", "content": "x"}]}', "/v1/chat/completions"),
    ],
)
def test_a_bad_line_of_a_file_is_named(tmp_path, content, message):
    file = tmp_path / "prompts.jsonl"
    file.write_text(content)
    result = CliRunner().invoke(app, ["bench", "serve", "--dataset-name", "custom", "--dataset-path", str(file)])
    assert result.exit_code == 1
    assert message in result.stderr
