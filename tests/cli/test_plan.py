"""`jaxis plan`: its text, its JSON, its page, its exit codes."""

import json

import pytest
from typer.testing import CliRunner

from jaxis.cli.main import app
from tests.support.places import TESTS

QWEN = TESTS / "data" / "configs" / "qwen3-8b.json"


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """The config of a model of its kind with 2 layers: what is the same for any size takes a moment."""
    path = tmp_path_factory.mktemp("small") / "config.json"
    path.write_text(json.dumps(json.loads(QWEN.read_text()) | {"num_hidden_layers": 2}))
    return path


@pytest.fixture
def run(monkeypatch):
    """Runs the command in this process, on a terminal of 80 columns."""
    monkeypatch.setenv("COLUMNS", "80")
    return lambda *args: CliRunner().invoke(app, ["plan", *map(str, args)])


def test_text_says_what_fits_and_fits_80_columns(run):
    result = run(QWEN, "--on", "v6e-1")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    # The command to copy is one line, however long the model's name.
    assert max(len(line) for line in lines if "jaxis serve" not in line) <= 80
    assert not any(line != line.rstrip() for line in lines)
    assert "fits: bfloat16 weights over 1 device" in lines
    assert f"  jaxis serve {QWEN} --max-model-len 4096 --max-num-seqs 22" in lines
    assert any(line.split()[:2] == [">", "bfloat16"] for line in lines)
    assert any(line.startswith("  decode, 22 requests") and line.endswith("memory") for line in lines)
    assert any(line.startswith("  prefill of 2048 tokens") and line.endswith("compute") for line in lines)
    assert lines[-1].endswith("not measured")
    assert "…" not in result.stdout


def test_data_ranks_over_many_hosts_fit_80_columns(run):
    result = run(TESTS / "data" / "configs" / "deepseek-v3.json", "--on", "v5e-64", "--data-parallel-size", "8")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert max(len(line) for line in lines if "jaxis serve" not in line) <= 80
    assert "…" not in result.stdout
    assert "fits: fp8 weights over 64 devices (TP 8, DP 8, EP) of 16 hosts" in lines
    [gather] = [line for line in lines if line.startswith("  all-gather     tokens to experts")]
    assert gather.split()[4:7] == ["8", "data", "58"]
    assert gather.endswith("50% of ICI")


def test_without_a_target_it_is_one_of_each_kind(run, small):
    result = run(small)
    assert result.exit_code == 0, result.output
    assert "…" not in result.stdout
    for name in ("v5e:2x4", "v6e:2x4", "v5p:2x2x1", "tpu7x:2x2x1", "a100x8", "h100x8", "h200x8", "b200x8"):
        assert name in result.stdout


def test_what_does_not_fit_exits_with_1(run):
    result = run(QWEN, "--on", "v5e-1", "--quantization", "none")
    assert result.exit_code == 1
    assert "does not fit" in result.stdout
    assert result.stderr == ""
    both = run(QWEN, "--on", "v5e-1", "--on", "v6e-1", "--quantization", "none", "--json")
    assert both.exit_code == 1
    assert [plan["fits"] for plan in json.loads(both.stdout)["plans"]] == [False, True]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--on", "v9z-8"), "'v9z-8' is no accelerator"),
        (("--on", "v6e-1", "--on", "h100x1", "--compile"), "--compile is for one target"),
        (("--compile",), "--compile is for one target"),
        (("--on", "v6e-1", "--max-model-len", "50000"), "--max-model-len 50000 is more than the model's 40960"),
        (("--on", "v6e-8", "--data-parallel-size", "2"), "--data-parallel-size 2: the model has no experts"),
        (("--on", "v6e-8", "--enable-expert-parallel"), "--enable-expert-parallel: the model has no experts"),
    ],
)
def test_a_mistake_is_one_line(run, small, args, message):
    result = run(small, *args)
    assert result.exit_code == 3
    assert result.stdout == ""
    assert result.stderr.startswith("jaxis: error: ")
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_model_that_is_not_there_is_one_line(run, tmp_path):
    result = run(tmp_path / "nowhere", "--on", "v6e-1")
    assert result.exit_code == 3
    assert result.stderr.startswith("jaxis: error: there is no ")
