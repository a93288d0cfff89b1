"""`jaxis bench`: what it measures, what it prints, what it refuses."""

import json

import pytest

from jaxis.bench.limits import Limits
from tests.support.cli_model import CONFIG

LIMITS = Limits(2, read_bytes_per_second=10e9, copy_bytes_per_second=12e9, flops_per_second=1e12)
FLOAT32 = 4


@pytest.fixture(autouse=True)
def known_limits(monkeypatch):
    """Measuring them takes seconds and a gigabyte."""
    monkeypatch.setattr("jaxis.bench.session.limits_of_device", lambda: LIMITS)


def test_latency_of_the_embedded_model(invoke, tmp_path):
    file = tmp_path / "latency.json"
    loads = ("--input-len", 6, "--batch-size", "1,2", "--output-len", 3, "--repeats", 1)
    result = invoke("bench", "latency", *loads, "--json", file)
    assert result.exit_code == 0, result.output
    report = json.loads(file.read_text())
    assert [(r["batch_size"], r["input_len"], r["output_len"]) for r in report["results"]] == [(1, 6, 3), (2, 6, 3)]
    assert report["limits"] == LIMITS.to_json()
    for measured in report["results"]:
        num_bytes = measured["decode_weight_bytes"] + measured["decode_kv_bytes"]
        assert measured["decode_share_of_limit"] == pytest.approx(num_bytes / 10e9 / measured["decode_step_seconds"])
        assert measured["decode_tokens_per_second"] == pytest.approx(
            measured["batch_size"] * measured["decode_steps_per_second"]
        )
    assert report["start"]["seconds_to_first_token"] > report["results"][0]["time_to_first_token_seconds"]
    assert report["start"]["num_programs"] >= 2
    assert report["peak_memory_bytes"] >= report["start"]["peak_memory_bytes"] > 1e6
    for text in ("start to first token:", "peak memory:", "reads 10.0 GB/s", "1 x 6 + 3", "2 x 6 + 3"):
        assert text in result.stdout


def test_latency_counts_the_bytes_of_the_model(invoke, tokens_model, tmp_path):
    file = tmp_path / "latency.json"
    loads = ("--input-len", "4,12", "--output-len", 2, "--repeats", 1, "--load-format", "dummy", "--dtype", "float32")
    result = invoke("bench", "latency", tokens_model, *loads, "--json", file)
    assert result.exit_code == 0, result.output
    per_token = FLOAT32 * CONFIG["num_hidden_layers"] * 2 * CONFIG["num_key_value_heads"] * CONFIG["head_dim"]
    contexts = [measured["context_len"] for measured in json.loads(file.read_text())["results"]]
    assert contexts == [5, 13]
    assert [m["decode_kv_bytes"] for m in json.loads(file.read_text())["results"]] == [5 * per_token, 13 * per_token]


def test_throughput(invoke, tokens_model, tmp_path):
    file = tmp_path / "throughput.json"
    loads = ("--num-prompts", 9, "--input-len", "4,12", "--output-len", "1,5", "--max-num-seqs", 4)
    result = invoke("bench", "throughput", tokens_model, *loads, "--load-format", "dummy", "--json", file)
    assert result.exit_code == 0, result.output
    [measured] = json.loads(file.read_text())["results"]
    assert measured["num_requests"] == 9
    assert 9 * 4 <= measured["num_input_tokens"] <= 9 * 12
    assert 9 <= measured["num_output_tokens"] <= 9 * 5
    assert measured["requests_per_second"] == pytest.approx(9 / measured["elapsed_seconds"])
    assert "requests/s:" in result.stdout


def test_latency_with_drafts(invoke, tmp_path):
    file = tmp_path / "latency.json"
    loads = ("--input-len", 6, "--batch-size", 2, "--output-len", 24, "--repeats", 3)
    result = invoke("bench", "latency", *loads, "--speculative-config", '{"method": "suffix"}', "--json", file)
    assert result.exit_code == 0, result.output
    [measured] = json.loads(file.read_text())["results"]
    assert measured["decode_tokens_per_second"] > 0
    assert len(measured["spec_decode_per_position_acceptance_rates"]) <= 15
    assert "drafts of 2 x 6 + 24: " in result.stdout


@pytest.mark.parametrize("value", ["", "0", "1,x", "-4", "1.5"])
def test_a_list_that_is_none_is_wrong_usage(invoke, value):
    result = invoke("bench", "latency", f"--batch-size={value}")
    assert result.exit_code == 2
    assert "--batch-size" in result.stderr


def test_a_file_that_cannot_be_written_is_refused_before_measuring(invoke, tmp_path):
    result = invoke("bench", "throughput", "--json", tmp_path / "missing" / "file.json")
    assert result.exit_code == 1
    assert "--json" in result.stderr
    assert result.stdout == ""


def test_more_requests_than_the_engine_takes_is_one_clear_error(invoke, tokens_model):
    options = ("--batch-size", 4, "--max-num-seqs", 2, "--load-format", "dummy", "--input-len", 4, "--output-len", 2)
    result = invoke("bench", "latency", tokens_model, *options)
    assert result.exit_code == 1
    assert "max_num_seqs=2" in result.stderr
    assert result.stderr.startswith("jaxis: error: ")
