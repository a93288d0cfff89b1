"""`jaxis verify`: what it prints, and how it ends. What it finds is tested in tests/bringup."""

import dataclasses
import json

import pytest
from typer.testing import CliRunner

from jaxis.bringup.verify.check_layers import Divergence, LayersCheck, ModuleComparison
from jaxis.bringup.verify.compare import GATES, LogitsComparison
from jaxis.bringup.verify.images import ImagesCheck
from jaxis.bringup.verify.paths import PathCheck
from jaxis.bringup.verify.verify import DecodeCheck, LogitsCheck, VerifyResult
from jaxis.cli.main import app

COMPARISON = LogitsComparison(17, 1e-5, 2e-6, 3e-12, 4e-12, 1.0, 0.99)
LAYERS = LayersCheck(96, 1e-4, (ModuleComparison("model.norm", 1e-7, 2e-7, 3e-7),), None, (), (), {})
RESULT = VerifyResult(
    model="some-model",
    architecture="LlamaForCausalLM",
    weights="tiny twin",
    reference="random weights in float32",
    dtype="float32",
    gates=GATES["float32"],
    layers=LAYERS,
    images=ImagesCheck(24, 5e-7, COMPARISON, True),
    logits=(LogitsCheck(17, COMPARISON, True),),
    paths=(PathCheck("prefix cache hit", COMPARISON, True),),
    decode=DecodeCheck(40, 24, 24, None, True),
    versions={},
    hashes={},
    seconds=12.0,
)
AT_FAULT = Divergence(
    "between_children", "model.layers.3.self_attn", "what it gives o_proj", None, "o_proj", 0.5, 1e-7, 0.4, ("q_norm",)
)


@pytest.fixture
def run(monkeypatch):
    """Runs the command on a result that is given; returns what it printed and what it asked for."""

    def invoke(result, *arguments):
        asked = {}

        def verify(model, **options):
            asked.update(options, model=model)
            return result

        monkeypatch.setattr("jaxis.bringup.verify.verify.verify", verify)
        return CliRunner().invoke(app, ["verify", *arguments]), asked

    return invoke


def test_a_right_model_is_a_table_and_exit_code_0(run):
    result, asked = run(RESULT, "some-model", "--dtype", "bfloat16", "--prompt-lens", "1, 40")
    assert result.exit_code == 0
    assert asked["model"] == "some-model"
    assert (asked["dtype"], asked["prompt_lengths"]) == ("bfloat16", [1, 40])
    for text in ("logits, 17 tokens", "2.0e-06", "prefix cache hit", "24 of 24", "an image,", "verified in 12 s"):
        assert text in result.stdout


def test_a_wrong_model_names_the_module_and_exits_with_1(run):
    wrong = dataclasses.replace(RESULT, layers=dataclasses.replace(LAYERS, divergence=AT_FAULT))
    result, _ = run(wrong, "some-model")
    assert result.exit_code == 1
    assert "FAIL" in result.stdout
    assert "at fault: model.layers.3.self_attn: what it gives o_proj is off by 5.0e-01" in result.stdout
    assert "not called: q_norm" in result.stdout
    [row] = [line for line in result.stdout.splitlines() if "layers," in line]
    assert "5.0e-01" in row
    assert row.rstrip().endswith("FAIL")


def test_json_has_every_figure(run):
    result, _ = run(RESULT, "some-model", "--json")
    found = json.loads(result.stdout)
    assert found["passed"] is True
    assert found["logits"][0]["comparison"]["relative_error"] == 2e-6
    assert found["layers"]["modules"][0]["name"] == "model.norm"
    assert found["decode"]["num_equal"] == 24


def test_skipped_tokens_and_notes_are_said(run):
    layers = dataclasses.replace(LAYERS, call_counts={"model.norm": (2, 1)}, unmatched=("model.embed_norm",))
    decode = DecodeCheck(40, 24, 0, None, False, skipped="logits failed")
    wrong = dataclasses.replace(RESULT, layers=layers, decode=decode, logits=(LogitsCheck(17, COMPARISON, False),))
    result, _ = run(wrong, "some-model")
    [row] = [line for line in result.stdout.splitlines() if line.strip().startswith("greedy")]
    assert row.rstrip().endswith("skipped")
    assert "ok" not in row
    assert "the reference calls model.norm twice, jaxis once\n" in result.stdout
    assert "no module of the name: model.embed_norm\n" in result.stdout
    found = json.loads(run(wrong, "some-model", "--json")[0].stdout)
    assert (found["schema"], found["status"], found["failing_checks"]) == (1, "differs", ["logits", "decode"])


def test_lengths_may_stand_apart(run):
    assert run(RESULT, "some-model", "--prompt-lens", "1", "17")[1]["prompt_lengths"] == [1, 17]


@pytest.mark.parametrize(("command", "schema"), [("verify", 1), ("analyze", 3)])
def test_what_could_not_run_is_a_json_object_too(command, schema, tmp_path):
    result = CliRunner().invoke(app, [command, str(tmp_path / "nowhere"), "--json"])
    assert result.exit_code == 3
    found = json.loads(result.stdout)
    assert (found["schema"], found["status"], found["error"]["code"]) == (schema, "error", "checkpoint")
    assert result.stderr == f"jaxis: error: {found['error']['message']}\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["17"], "unexpected: 17"),
        (["--prompt-lens", "1,x"], "'1,x' is not a list of lengths"),
        (["--prompt-lens", "0"], "not a list of lengths"),
        (["--golden", "a", "--save-golden", "b"], "give it alone"),
        (["--golden", "a", "--prompt-lens", "5"], "give it alone"),
        (["--dtype", "int8"], "int8"),
    ],
)
def test_wrong_usage_exits_with_2(run, arguments, said):
    result, asked = run(RESULT, "some-model", *arguments)
    assert result.exit_code == 2
    assert said in " ".join(result.stderr.replace("│", " ").split())
    assert not asked
